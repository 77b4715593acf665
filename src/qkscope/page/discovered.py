"""Features that were found without labels, in words: a head, its features with the texts where they are strongest, and
the atlas of all heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qkscope.analyses.names.study import counted
from qkscope.heads import Head
from qkscope.page.block import Block, Row, Tables, number


def relation_words(row: Row) -> str:
    """What a head is called."""
    return str(row.get("name") or "")


def share_words(share: float | None, whose: str = "the logit") -> str:
    """A share in words."""
    return f"{share or 0:.0%} of {whose}"


_PASSAGE = ("text", "query_start", "query_stop", "key_start", "key_stop")
_SCORES = {
    "directions": "directions", "logit_share": "logit carried", "relation_rate": "looks at it so often",
    "mass": "off the first token",
}  # fmt: skip


def cards(name: str, heads: Sequence[Row], tables: Tables) -> Iterator[Block]:
    """For each head a card per feature, with what speaks for it and its texts, and the head's spectrum."""
    examples = tables.get("examples", ())
    for i, head in enumerate(heads):
        features, texts, spectrum = (
            [row for row in tables.get(each, ()) if row["head"] == head["head"]]
            for each in ("features", "examples", "spectrum")
        )
        options = {
            "cards": [_card(row) for row in features],
            "examples": texts,
            "spectrum": spectrum,
            "marks": _marks(examples) if i == 0 else [],  # said once
        }
        looks = relation_words(head)
        title = f"{head['head']} looks at {looks}" if looks else f"{head['head']}: {head['verdict']}"
        yield Block("cards", title, _head_words(head), features, options, "features", leads=True)


def _head_words(head: Row) -> str:
    if not head["directions"]:
        return f"Its queries and the keys it attends to do not go together more than by chance: {head['verdict']}."
    said = (
        "What its queries ask and what the keys it attends to offer go together in "
        f"{counted(head['directions'], 'direction')}, more than when passages are shuffled "
        f"(q {number(head['q'], '.2g')}). They carry {share_words(head['logit_share'])} by which the most attended key "
        f"leads another; {number(head['mass'], '.0%')} of its attention is off the first token."
    )
    if head["diagonal"] is not None:
        shares = [number(head[column], ".0%") for column in ("diagonal", "diagonal_null")]
        said += f" Like meets like: {shares[0]} of the interaction (chance up to {shares[1]})."
    return said


def _marks(examples: Sequence[Row]) -> list[str]:
    """Which marks the texts have."""
    itself = any(row["query_start"] == row["key_start"] for row in examples)
    return [*(("query", "key") if examples else ()), *(("both",) if itself else ())]


def _card(row: Row) -> dict[str, Any]:
    facts = [f"It carries {share_words(row['logit_share'])}."]
    if row.get("nearest_contrast"):
        chance = row.get("contrast_cos_chance")
        beside = "" if chance is None else f", chance {chance:.2f}"
        cosine = number(row["contrast_cos"], ".2f")
        facts.insert(0, f"Nearest to the labelled feature {row['nearest_contrast']} (cosine {cosine}{beside}).")
    if not row["identifiable"]:
        facts.append("Its dimensions cannot be told apart one by one: the space they span is the finding.")
    facts.append(
        f"Query and key agree by {number(row['match'], '.2f')} (chance {number(row['match_null'], '.2f')}); halves of "
        f"the text find the same by {number(row['stability'], '.2f')} (1: exactly)."
    )
    if row.get("singular_cos") is not None:
        facts.append(f"Near singular vector {row['singular_vector'] + 1} of the weights ({row['singular_cos']:.2f}).")
    bars = [["this feature", "self_contrast", row["carried"], row["carried_low"], row["carried_high"]]]
    for name in ("cov_qk", "key_pca", "random"):
        if f"carried_{name}" in row:
            bars.append([name.replace("_", " "), name, row[f"carried_{name}"], None, None])
    return {
        "feature": row["feature"], "facts": " ".join(facts), "loose": not row["identifiable"], "bars": bars,
        "title": f"Feature {row['feature']}" + (f", {row['size']} dimensions" if row["size"] > 1 else ""),
    }  # fmt: skip


def atlas(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    """Every head on a map and in a line, with its texts."""
    words = (
        "A line for each head: the token it looks at most (a copy is one of the asking token), beside chance; in how "
        "many directions its queries and the keys it attends to go together more than when passages are shuffled; and "
        "what these carry of the logit by which that token leads another. To go together is not yet to be used: what "
        "swapping two of the directions carries stands beside two principal components of the keys and two random "
        "directions. Below each line, the text where its directions add most, which need not be the usual one. Click a "
        "head on the map, a line for more, a column to sort."
    )
    examples = tables.get("examples", ())
    texts: dict[str, list[Mapping[str, Any]]] = {}
    for row in examples:
        texts.setdefault(row["head"], []).append({part: row[part] for part in _PASSAGE})
    looks = {row["head"]: relation_words(row).replace(" of the asking token", "") for row in rows}  # said in the words
    said = {row["head"]: {"relation": looks[row["head"]], "facts": _facts(row)} for row in rows}
    scores = {score: title for score, title in _SCORES.items() if score in rows[0]}
    options = {"examples": texts, "said": said, "marks": _marks(examples), "scores": scores}
    yield Block("atlas", "Every head", words, rows, options, name, leads=True)


def reads(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    """Which head reads what which other wrote."""
    later = [row for row in rows if Head.parse(row["reader"]).layer > 0]
    passages = max((row["n"] for row in later), default=0)
    words = (
        "Heads read what earlier parts of the model wrote: heads, MLPs and the embedding. The logit by which a head's "
        "most attended token (the first aside) leads the others is a sum over those who wrote its key, and also over "
        "those who wrote its query. A column is a reading head, a line a writer; a mark is as large as the writer's "
        "share of that sum, and the five largest of each head are drawn. Marks in a line: many read this writer "
        "(readers: heads of whose logit it has a tenth or more). Means over passages in which that token gets 5% of "
        f"the head's attention, at most {passages}; point at a mark for how many, as few give a loose share. Having "
        "written is not yet being needed: qkscope trace tests that. Heads of the first layer read the embedding alone "
        "and are not drawn. Click a mark to see its reader alone."
    )
    if later:
        yield Block("reads", "Who reads whom", words, later, table=name)


def _facts(row: Row) -> str:
    return (
        f"Queries and keys: {row['verdict']} (q {number(row.get('q'), '.2g')}, z {number(row.get('z'), '.1f')}). "
        f"{number(row['mass'], '.0%')} of its attention is off the first token, "
        f"{number(row.get('top_weight'), '.0%')} of that on one key. {_written(row)}"
        f"To take it apart: qkscope discover … --heads {row['head']}"
    )


def _written(row: Row) -> str:
    """Its first writers; nothing where they are not known."""
    if not row.get("traced"):
        return ""
    sides = [f"{row[f'{side}_writer']} ({number(row[f'{side}_share'], '.0%')})" for side in ("key", "query")]
    return f"First writer of its keys: {sides[0]}, of its queries: {sides[1]} ({counted(row['traced'], 'passage')}). "
