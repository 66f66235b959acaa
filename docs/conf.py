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
autodoc_default_options = {"exclude-members": "__init__, __new__"}
python_maximum_signature_line_length = 90  # longer ones get a line per argument
highlight_language = "none"  # blocks without a language are commands and output
autodoc_class_signature = "separated"  # groups and handles are made by functions, not by their constructors
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]
pygments_style = "tango"  # lines of a diff in red and green
nitpicky = False
myst_heading_anchors = 3
# Files of the repository that pages link to but that are no pages.
suppress_warnings = ["myst.xref_missing"]
