"""veScale: the release on PyPI is older than its ragged shards, so there is nothing to run yet."""

from __future__ import annotations

from typing import Any

ENVIRONMENT = "placeholders"
PIP_OPTIONS = ["--no-deps"]
REQUIREMENTS = ["vescale"]
PROBE = (
    "from importlib.metadata import files; texts = [f.read_text() for f in files('vescale') if f.suffix == '.py'];"
    "assert any('RaggedShard' in text for text in texts), 'this release has no RaggedShard'"
)
CASES: dict[str, Any] = {}
