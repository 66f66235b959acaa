"""What importing the package costs everybody who does."""

import subprocess
import sys


def test_the_compiler_is_not_imported():
    """torch._dynamo takes longer to import than torch itself."""
    code = "import sys, unisono; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0
