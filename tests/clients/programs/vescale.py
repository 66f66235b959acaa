"""veScale: the release on PyPI is older than its ragged shards, so there is nothing to run yet."""

from __future__ import annotations

from typing import Any

ENVIRONMENT = "placeholders"
PIP_OPTIONS = ["--no-deps"]
REQUIREMENTS = ["vescale"]
PROBE = "from vescale.dtensor.placement_types import RaggedShard"
CASES: dict[str, Any] = {}
