"""A result as one plain HTML page without scripts: the answer, the claims, every table, and what made it."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping

from jinja2 import Environment

from qkscope.result import Result

_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ result.experiment }} - qkscope</title>
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.2rem; font-weight: 600; } h2 { font-size: 1rem; margin-top: 2rem; }
.answer { font-size: 1.3rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .25rem .7rem; text-align: left; border-bottom: 1px solid #8884; white-space: nowrap; }
td.number { text-align: right; }
img { max-width: 100%; }
pre { overflow-x: auto; font-size: .8rem; }
</style>
</head>
<body>
<h1>{{ result.experiment }}{% if result.preset %} ({{ result.preset }}){% endif %}</h1>
{% if result.answer %}<p class="answer">{{ result.answer }}</p>{% endif %}
{% for name, data in pictures.items() %}
<figure><img alt="{{ name }}" src="data:image/png;base64,{{ data }}"><figcaption>{{ name }}</figcaption></figure>
{% endfor %}
{% for name, rows in tables.items() if rows %}
<h2>{{ name }}</h2>
<div class="scroll" tabindex="0"><table>
<thead><tr>{% for column in rows[0] %}<th scope="col">{{ column }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}<tr>{% for column in rows[0] %}{{ cell(row[column]) }}{% endfor %}</tr>
{% endfor %}</tbody></table></div>
{% endfor %}
<h2>What made this</h2>
<pre>{{ manifest }}</pre>
</body>
</html>
"""


def plain_page(result: Result, pictures: Mapping[str, bytes] | None = None) -> str:
    """The page as text; ``pictures`` are PNG files by caption, inlined. Everything from the result is escaped."""
    from markupsafe import Markup, escape

    def cell(value: object) -> Markup:
        if isinstance(value, bool) or value is None:
            return Markup(f"<td>{'' if value is None else ('yes' if value else 'no')}</td>")
        if isinstance(value, int | float):
            return Markup(f'<td class="number">{value:.4g}</td>')
        return Markup("<td>") + escape(str(value)) + Markup("</td>")

    plain = result.to_json()
    tables = ({"claims": plain["claims"]} if plain["claims"] else {}) | plain["tables"]
    return (
        Environment(autoescape=True)
        .from_string(_TEMPLATE)
        .render(
            result=result,
            tables=tables,
            cell=cell,
            pictures={name: base64.b64encode(data).decode() for name, data in (pictures or {}).items()},
            manifest=json.dumps(result.provenance, indent=1, ensure_ascii=False, default=str),
        )
    )
