"""``python -m unisono`` is the same as the command ``unisono``."""

import sys

from unisono.cli import main

sys.exit(main())
