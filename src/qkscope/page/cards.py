"""Cards of discovered features and the table of an atlas, put into the offline page.

A card holds what speaks for one feature: the text where it is strongest with its two tokens marked, the spectrum of its
head against the null, and what swapping it does beside baselines of the same size. Everything from a result is escaped;
the one script, which sorts and filters the atlas, is named in the page's content policy by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape

from qkscope.analyses.discover.discover import counted
from qkscope.page.report import asset
from qkscope.runs.result import Result

Row = Mapping[str, Any]


def add_section(page: str, section: str, script: str = "") -> str:
    """The page with a section after its answer, and with one more script that its content policy knows."""
    head, found, rest = page.partition("</h1>")
    if not found:
        raise ValueError("the page has no answer to put a section after")
    page = head + found + f"<style>{asset('cards.css')}</style>" + section + rest
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        page = page.replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
        before, end, after = page.rpartition("</body>")  # a script above may speak of one
        page = f"{before}<script>{script}</script>{end}{after}"
    return page


def feature_cards(result: Result) -> str:
    """One card per feature, under the head it belongs to."""
    out = _marks(result.tables["examples"])
    for head in result.tables["heads"]:
        name = head["head"]
        features = [row for row in result.tables["features"] if row["head"] == name]
        spectrum = [row for row in result.tables["spectrum"] if row["head"] == name]
        out += Markup('<section class="block"><h2 class="headline">{}: {}</h2><p class="words">{}</p>{}').format(
            name, head["verdict"], _head_words(head), _spectrum(spectrum)
        )
        cards = Markup("").join(
            _card(row, [e for e in result.tables["examples"] if (e["head"], e["feature"]) == (name, row["feature"])])
            for row in features
        )
        out += Markup('<div class="cards">{}</div></section>').format(cards)
    return str(out)


def _known(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _number(value: Any, how: str = ".2f") -> str:
    """A number as text; a dash where there is none, as of a head that nothing could be swapped at."""
    return format(value, how) if _known(value) else "–"


def _marks(examples: Sequence[Row]) -> Markup:
    """What the marks in the texts mean; nothing where there are no texts."""
    if not examples:
        return Markup("")
    said = Markup(
        '<mark class="query">query</mark> the token that asks, <mark class="key">key</mark> the one it attends to most'
    )
    if any(_span(row, "query") == _span(row, "key") for row in examples):
        said += Markup(', <mark class="both">both</mark> one that attends to itself')
    return Markup('<p class="words marks">In the texts: {}.</p>').format(said)


def _head_words(head: Row) -> str:
    said = (
        f"Queries and attended keys go together in {counted(head['directions'], 'direction')} above the shuffled null "
        f"(q {_number(head['q'], '.2g')}, z {_number(head.get('z'), '.1f')}), {counted(head['features'], 'feature')}; "
        f"{_number(head['mass'], '.0%')} of its attention is off the first token; its features carry "
        f"{_number(head['logit_share'], '.0%')} of the logit of the most attended key over another."
    )
    if _known(head["diagonal"]):
        chance = _number(head["diagonal_null"], ".0%")
        said += f" Like meets like: {head['diagonal']:.0%} of the interaction (chance up to {chance})."
    if head["relation"] is not None:
        said += f" It attends most to {relation_words(head)}."
    return said


def relation_words(row: Row) -> str:
    """What the attended token is to the asking one, beside chance."""
    rate, chance = (_number(row[name], ".0%") for name in ("relation_rate", "relation_chance"))
    return f"{row['relation']} ({rate}, chance {chance})"


def _card(row: Row, examples: Sequence[Row]) -> Markup:
    kind = "card" if row["identifiable"] else "card loose"
    title = f"Feature {row['feature']}" + (f", {row['size']} dimensions" if row["size"] > 1 else "")
    facts = [
        f"query and key agree {_number(row['match'])} (chance {_number(row['match_null'])})",
        f"stability {_number(row['stability'])}", f"logit share {_number(row['logit_share'], '.0%')}",
    ]  # fmt: skip
    if not row["identifiable"]:
        facts.insert(0, "only the span is a finding: its directions are not identifiable")
    if row.get("nearest_contrast"):
        chance = row.get("contrast_cos_chance")
        beside = f", chance {chance:.2f}" if _known(chance) else ""
        facts.append(f"nearest contrast {row['nearest_contrast']} (cos {_number(row['contrast_cos'])}{beside})")
    if _known(row.get("singular_cos")):
        facts.append(f"singular vector {row['singular_vector'] + 1} (cos {row['singular_cos']:.2f})")
    shown = Markup("").join(_example(example) for example in examples)
    return Markup('<article class="{}"><h3>{}</h3><p class="facts">{}</p>{}{}</article>').format(
        kind, title, "; ".join(facts) + ".", _causal(row), shown
    )


def _example(row: Row) -> Markup:
    """Text with the query and the key it attends to marked; they may be the same token."""
    text = row["text"]
    query, key = _span(row, "query"), _span(row, "key")
    marks = [(*query, "both")] if query == key else sorted([(*query, "query"), (*key, "key")])
    out, last = Markup(""), 0
    for start, stop, kind in marks:
        if start < last:
            continue
        out += escape(text[last:start]) + Markup('<mark class="{}">{}</mark>').format(kind, text[start:stop])
        last = stop
    return Markup("<blockquote>{}{}</blockquote>").format(out, text[last:])


def _span(row: Row, side: str) -> tuple[int, int]:
    return row[f"{side}_start"], row[f"{side}_stop"]


def _causal(row: Row) -> Markup:
    """The part of the logit between two keys that a swap of the feature carries, beside baselines of the same size."""
    bars = [("this feature", row["carried"], row["carried_low"], row["carried_high"])]
    bars += [
        (name.replace("_", " "), row[f"carried_{name}"], None, None)
        for name in ("cov_qk", "key_pca", "random")
        if f"carried_{name}" in row
    ]
    widest = max([0.2, *(end for _, value, _, high in bars for end in (value, high) if _known(end))])
    out, left = Markup(""), 90.0

    def along(value: float) -> float:
        return left + 170 * max(value, 0) / widest

    for i, (name, value, low, high) in enumerate(bars):
        y, end, said = 4 + 17 * i, left, _number(value)
        out += Markup('<text x="84" y="{}" text-anchor="end">{}</text>').format(y + 10, name)
        if _known(value):
            end = along(value)
            out += Markup('<rect class="{}" x="{}" y="{}" width="{:.1f}" height="11"/>').format(
                "baseline" if i else "feature", left, y, end - left
            )
        if _known(low) and _known(high):
            end, said = max(end, along(high)), f"{said} [{low:.2f}, {high:.2f}]"  # bars end at 0, and it may be below
            line = f"M{along(low):.1f} {y + 5.5}H{along(high):.1f}"
            out += Markup('<path class="under" d="{0}"/><path d="{0}" stroke="currentColor"/>').format(line)
        out += Markup('<text class="soft" x="{:.1f}" y="{}">{}</text>').format(end + 6, y + 10, said)
    return Markup(
        "<figure><figcaption>Logit between two keys that swapping it carries (95% interval), beside baselines of the "
        'same size</figcaption><svg viewBox="0 0 380 {}" role="img" aria-label="logit carried by a swap">{}</svg>'
        "</figure>"
    ).format(6 + 17 * len(bars), out)


def _spectrum(rows: Sequence[Row]) -> Markup:
    """Singular values of the head's self-contrast; the dash is the 95% quantile under the shuffled null."""
    if not rows:
        return Markup("")
    highest = max(max(row["value"], row["null_high"] or 0) for row in rows) or 1.0
    out = Markup("")
    for i, row in enumerate(rows):
        x, y = 12 + 26 * i, 74 - 66 * row["value"] / highest
        fill = "var(--original)" if row["above"] else "none"
        out += Markup('<circle cx="{}" cy="{:.1f}" r="4" fill="{}" stroke="var(--original)"/>').format(x, y, fill)
        if row["null_high"] is not None:
            at = 74 - 66 * row["null_high"] / highest
            out += Markup('<path d="M{} {:.1f}h14" stroke="var(--bad)"/>').format(x - 7, at)
        out += Markup('<text class="soft" x="{}" y="90" text-anchor="middle">{}</text>').format(x, row["component"])
    width = 26 * len(rows) + 8
    return Markup(
        "<figure><figcaption>Singular values of the self-contrast; a dash is their 95% quantile when passages exchange "
        'what they attended to, or its direction alone</figcaption><svg viewBox="0 0 {} 94" width="{}" role="img" '
        'aria-label="spectrum against the null">{}</svg>'
        "</figure>"
    ).format(width, width, out)


_COLUMNS = (
    "head",
    "directions",
    "q",
    "z",
    "mass",
    "top_weight",
    "logit_share",
    "carried",
    "carried_key_pca",
    "carried_random",
)
_NAMES = {
    "head": "head", "directions": "directions", "q": "q", "z": "z", "mass": "off the first", "top_weight": "on one key",
    "logit_share": "logit share", "carried": "first two", "carried_key_pca": "key PCA", "carried_random": "random",
}  # fmt: skip


def atlas_table(result: Result) -> tuple[str, str]:
    """The sortable table of all heads, and its script."""
    rows = result.tables["atlas"]
    texts: dict[str, Row] = {}
    for example in result.tables.get("examples", ()):
        texts.setdefault(example["head"], example)
    verdicts = list(dict.fromkeys(row["verdict"] for row in rows))
    head = Markup("").join(
        Markup('<th scope="col" class="n"><button type="button">{}</button></th>').format(_NAMES[c]) for c in _COLUMNS
    ) + Markup(
        '<th scope="col"><button type="button">attends to</button></th><th scope="col">where it is strongest</th>'
    )
    body = Markup("").join(_atlas_row(row, texts.get(row["head"])) for row in rows)
    options = Markup("").join(Markup('<option value="{0}">{0}</option>').format(verdict) for verdict in verdicts)
    return str(
        Markup(
            '<section class="block atlas"><h2>Every head</h2><p class="words">Directions in which queries and '
            "attended keys go together more than when passages exchange them (false-discovery rate 5% over all heads, "
            "z in units of the null): this says that they go together, not that the head uses it, and heads that only "
            "follow their mean query pass too. Beside it: what they carry of the logit between the most attended key "
            "and another, what the first two carry beside as many key principal components and random directions, and "
            "what the most attended token is to the asking one. "
            'Click a column to sort.</p>{}<p class="choices"><input type="search" '
            'aria-label="filter" placeholder="L18, Anna, ..."> <select aria-label="verdict"><option value="">all'
            '</option>{}</select> <output></output></p><div class="scroll" tabindex="0"><table><thead><tr>{}</tr>'
            "</thead><tbody>{}</tbody></table></div></section>"
        ).format(_marks(result.tables.get("examples", ())), options, head, body)
    ), asset("atlas.js")


def _atlas_row(row: Row, example: Row | None) -> Markup:
    cells = Markup('<td data-value="{}">{}</td>').format(row["layer"] * 1000 + row["index"], row["head"])
    for column in _COLUMNS[1:]:
        value = row.get(column)
        shown = _number(value, "d" if isinstance(value, int) else ".2g" if column == "q" else ".2f")
        cells += Markup('<td class="n" data-value="{}">{}</td>').format(_order(value), shown)
    known = row.get("relation") is not None
    cells += Markup('<td class="relation" data-value="{}">{}</td>').format(
        _order(row["relation_rate"] if known else None), relation_words(row) if known else "–"
    )
    text = _example(example) if example is not None else Markup("")
    return Markup('<tr data-verdict="{}">{}<td class="text">{}</td></tr>').format(row["verdict"], cells, text)


def _order(value: Any) -> Any:
    """What the script sorts by: what is missing is smaller than any number."""
    return value if _known(value) else "-Infinity"
