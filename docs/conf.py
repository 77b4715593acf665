"""Sphinx: MyST pages in the furo theme, with formulas as MathML, which browsers draw by themselves.

The source folder is the repository, so that pages in docs/ and reports in papers/docs/ and bench/docs/
link to each other as files do.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

project = "qkscope"
author = "The qkscope authors"
copyright = "2026, the qkscope authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
root_doc = "docs/index"
include_patterns = ["docs/**", "papers/docs/**", "bench/docs/**"]
exclude_patterns = ["docs/_build"]
html_theme = "furo"
html_title = "qkscope"
html_show_search_summary = False  # summaries are fetched, which a browser forbids a page from disk
html_math_renderer = (
    "mathml"  # MathJax would come from elsewhere, and a page from disk would show bare TeX
)
html_static_path, html_css_files = ["_static"], ["math.css"]
autodoc_typehints = "none"
autodoc_mock_imports: list[str] = []


def _inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def _block(writer: Any, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>\n')
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Give Sphinx the renderer of formulas."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
