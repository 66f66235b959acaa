"""torchcomms: what PyPI has of it is a placeholder, so there is nothing to run yet."""

from __future__ import annotations

from typing import Any

ENVIRONMENT = "placeholders"
REQUIREMENTS = ["torchcomms"]
PROBE = "import torchcomms"
CASES: dict[str, Any] = {}
