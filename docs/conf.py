"""Sphinx: MyST pages in the furo theme."""

project = "qkscope"
author = "The qkscope authors"
copyright = "2026, the qkscope authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "qkscope"
autodoc_typehints = "none"
autodoc_mock_imports: list[str] = []
