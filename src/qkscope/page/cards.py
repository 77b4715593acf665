"""Cards of discovered features and the table of an atlas, put into the offline page.

A card holds what speaks for one feature: the text where it is strongest with its two tokens marked, the spectrum of its
head against the null, and what swapping it does beside baselines of the same size. Everything from a result is escaped;
the one script, which sorts and filters the atlas, is named in the page's content policy by its hash.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape

from qkscope.analyses.discover import counted
from qkscope.page.report import asset
from qkscope.result import Result

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
    out = Markup("")
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


def _head_words(head: Row) -> str:
    said = (
        f"{counted(head['directions'], 'direction')} above shuffled queries, {counted(head['features'], 'feature')}; "
        f"{head['mass']:.0%} of its attention is off the first token; its features carry {head['logit_share']:.0%} of "
        "the logit of the most attended key over another."
    )
    if head["diagonal"] is not None:
        said += (
            f" Like meets like: {head['diagonal']:.0%} of the interaction (chance up to {head['diagonal_null']:.0%})."
        )
    if head["relation"] is not None:
        said += f" It attends most to {relation_words(head)}."
    return said


def relation_words(row: Row) -> str:
    """What the attended token is to the asking one, beside chance."""
    return f"{row['relation']} ({row['relation_rate']:.0%}, chance {row['relation_chance']:.0%})"


def _card(row: Row, examples: Sequence[Row]) -> Markup:
    kind = "card" if row["identifiable"] else "card loose"
    title = f"Feature {row['feature']}" + (f", {row['size']} dimensions" if row["size"] > 1 else "")
    facts = [
        f"query and key agree {row['match']:.2f} (chance {row['match_null']:.2f})", f"stability {row['stability']:.2f}",
        f"logit share {row['logit_share']:.0%}",
    ]  # fmt: skip
    if not row["identifiable"]:
        facts.insert(0, "only the span is a finding: its directions are not identifiable")
    if row.get("nearest_contrast"):
        facts.append(f"nearest contrast {row['nearest_contrast']} (cos {row['contrast_cos']:.2f})")
    if row.get("singular_cos") is not None:
        facts.append(f"singular vector {row['singular_vector'] + 1} (cos {row['singular_cos']:.2f})")
    shown = Markup("").join(_example(example) for example in examples)
    return Markup('<article class="{}"><h3>{}</h3><p class="facts">{}</p>{}{}</article>').format(
        kind, title, "; ".join(facts) + ".", _causal(row), shown
    )


def _example(row: Row) -> Markup:
    """Text with the query and the key it attends to marked; they may be the same token."""
    text = row["text"]
    query, key = (row["query_start"], row["query_stop"]), (row["key_start"], row["key_stop"])
    marks = [(*query, "both")] if query == key else sorted([(*query, "query"), (*key, "key")])
    out, last = Markup(""), 0
    for start, stop, kind in marks:
        if start < last:
            continue
        out += escape(text[last:start]) + Markup('<mark class="{}">{}</mark>').format(kind, text[start:stop])
        last = stop
    return Markup("<blockquote>{}{}</blockquote>").format(out, text[last:])


def _causal(row: Row) -> Markup:
    """The part of the logit between two keys that a swap of the feature carries, beside baselines of the same size."""
    bars = [("this feature", row["carried"], row["carried_low"], row["carried_high"], "var(--target)")]
    bars += [
        (name.replace("_", " "), row[f"carried_{name}"], None, None, "var(--rest)")
        for name in ("cov_qk", "key_pca", "random")
        if row.get(f"carried_{name}") is not None
    ]
    widest = max(0.2, *(max(value, high or 0) for _, value, _, high, _ in bars))
    out = Markup("")
    for i, (name, value, low, high, colour) in enumerate(bars):
        y, left, width = 4 + 17 * i, 90, 240 * max(value, 0) / widest
        out += Markup('<text x="84" y="{}" text-anchor="end">{}</text><rect x="{}" y="{}" width="{:.1f}" height="11" '
                      'fill="{}"/>').format(y + 10, name, left, y, width, colour)  # fmt: skip
        if low is not None and high is not None:
            a, b = (left + 240 * max(x, 0) / widest for x in (low, high))
            out += Markup('<path d="M{:.1f} {}H{:.1f}" stroke="currentColor"/>').format(a, y + 5.5, b)
        out += Markup('<text class="soft" x="{:.1f}" y="{}">{}</text>').format(
            left + max(width, 240 * max(high or 0, 0) / widest) + 6, y + 10, f"{value:.2f}"
        )
    return Markup('<svg viewBox="0 0 380 {}" role="img" aria-label="logit carried by a swap">{}</svg>').format(
        6 + 17 * len(bars), out
    )


def _spectrum(rows: Sequence[Row]) -> Markup:
    """Singular values of the head's self-contrast; the dash is the 95% quantile under shuffled queries."""
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
        '<svg viewBox="0 0 {} 94" width="{}" role="img" aria-label="spectrum against the null">{}</svg>'
    ).format(width, width, out)


_COLUMNS = (
    "head",
    "directions",
    "q",
    "mass",
    "top_weight",
    "logit_share",
    "carried",
    "carried_key_pca",
    "carried_random",
)
_NAMES = {
    "head": "head", "directions": "directions", "q": "q", "mass": "off the first", "top_weight": "on one key",
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
            '<section class="block atlas"><h2>Every head</h2><p class="words">Directions above shuffled queries '
            "(false-discovery rate 5% over all heads), what they carry of the logit between the most attended key and "
            "another, what the first two carry beside as many key principal components and random directions, and what "
            "the most attended token is to the asking one. "
            'Click a column to sort.</p><p class="choices"><input type="search" '
            'aria-label="filter" placeholder="L18, Anna, ..."> <select aria-label="verdict"><option value="">all'
            '</option>{}</select> <output></output></p><div class="scroll" tabindex="0"><table><thead><tr>{}</tr>'
            "</thead><tbody>{}</tbody></table></div></section>"
        ).format(options, head, body)
    ), asset("atlas.js")


def _atlas_row(row: Row, example: Row | None) -> Markup:
    order = row["layer"] * 1000 + row["index"]
    cells = Markup('<td data-value="{}">{}</td>').format(order, row["head"])
    for column in _COLUMNS[1:]:
        value = row[column]
        shown = str(value) if isinstance(value, int) else f"{value:.2g}" if column == "q" else f"{value:.2f}"
        cells += Markup('<td class="n" data-value="{}">{}</td>').format(value, shown)
    known = row.get("relation") is not None
    cells += Markup('<td class="relation" data-value="{}">{}</td>').format(
        row["relation_rate"] if known else 0, relation_words(row) if known else ""
    )
    text = _example(example) if example is not None else Markup("")
    return Markup('<tr data-verdict="{}">{}<td class="text">{}</td></tr>').format(row["verdict"], cells, text)
