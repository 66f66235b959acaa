"""torchcomms: what PyPI has of it is a placeholder; tests/serving has unisono's backend on a stand-in."""

from __future__ import annotations

from typing import Any

ENVIRONMENT = "placeholders"
REQUIREMENTS = ["torchcomms"]
PROBE = "import torchcomms"
CASES: dict[str, Any] = {}
