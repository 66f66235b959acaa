"""How Sphinx builds the documentation: `make docs`."""

from importlib.metadata import version as _version

project = "unisono"
author = "the unisono authors"
release = version = _version("unisono")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"unisono {release}"
exclude_patterns = ["_build"]
autodoc_member_order = "groupwise"
autodoc_typehints = "description"
nitpicky = False
myst_heading_anchors = 3
# Files of the repository that pages link to but that are no pages.
suppress_warnings = ["myst.xref_missing"]
