"""Atlases: what the heads of a model do on plain text, each as a rule; some models' ship.

An `Atlas` is a result whose rules can be taken out and run. Files beside this one (``atlas-*.json``)
are those of some models, made by ``bench/atlas_measure.py``. Kinds of words are unions of word
classes, so the class of every token is kept once and a kind as the numbers of its classes.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.checking import checked_class
from qkscope.errors import BadInput
from qkscope.findings.rules import Rule
from qkscope.heads import Head
from qkscope.results.result import Result

_FOLDER = Path(__file__).parent
_DEPARTS = 0.2  # of attention: more than so much beside its rule is said


@dataclass(frozen=True)
class HeadRule:
    """A head of an atlas.

    Parameters
    ----------
    head : its name.
    kind : the field's word for what its rule mostly does; *no rule* where rest has over half.
    rule : that can take its place.
    rest : the weight of the head's mean row by distance.
    iou, mean_row_iou : how well the rule, and that mean row alone, give its rows on other text.
    cost : the rise of perplexity with the rule in its place, as a share.
    n : queries that it was tested on.
    """

    head: str
    kind: str
    rule: Rule
    rest: float
    iou: float
    mean_row_iou: float
    cost: float | None
    n: int


@checked_class
@dataclass(frozen=True)
class Atlas(Result):
    """All heads by rules; ``atlas["L17H5"].rule`` is one that can take the head's place."""

    main = "heads"

    def __getitem__(self, head: str | Head) -> HeadRule:
        """A head with its rule."""
        name = str(Head.parse(head))
        row = next((row for row in self.tables["heads"] if row["head"] == name), None)
        if row is None:
            raise BadInput(f"{name} is not in this atlas of {len(self.tables['heads'])} heads.")
        told = next(row for row in self.tables["rules"] if row["head"] == name)
        numbers = {key: row[key] for key in ("rest", "iou", "mean_row_iou", "cost", "n")}
        return HeadRule(name, row["kind"], self._rule(told), **numbers)

    def rules(self) -> dict[Head, Rule]:
        """The rule of every head."""
        return {Head.parse(row["head"]): self._rule(row) for row in self.tables["rules"]}

    def _rule(self, told: Mapping[str, Any]) -> Rule:
        """Read a row of the table ``rules``."""
        distances = {"back": told["back"], "first": told["first"]}
        return Rule.from_json(
            {"parts": told["parts"], "distances": distances}, self.arrays["classes"].tolist()
        )


def rule_row(head: Head, rule: Rule) -> dict[str, Any]:
    """A row of the table ``rules``."""
    data = rule.to_json()
    return {"head": str(head), "parts": data["parts"], **data["distances"]}


# ---------------------------------------------------------------------- files


def load_atlas(name: str | Path) -> Atlas:
    """An atlas that ships with qkscope, by the name of its model, or that `atlas` wrote.

    Parameters
    ----------
    name : of a model, or a folder.

    Examples
    --------
    >>> atlas = load_atlas("smollm2-135m")
    >>> atlas["L16H0"].kind
    'previous token'
    """
    if Path(name).is_dir():
        result = Result.read(name)
        if result.experiment != "atlas" or "rules" not in result.tables:
            raise BadInput(f"{name} holds no atlas of rules: name a folder that `atlas` wrote.")
        kept = (
            "experiment",
            "tables",
            "arrays",
            "model",
            "seed",
            "seconds",
            "answer",
            "provenance",
        )
        return Atlas(**{field: getattr(result, field) for field in kept})
    path = _FOLDER / f"atlas-{name}.json"
    shipped = sorted(path.stem.removeprefix("atlas-") for path in _FOLDER.glob("atlas-*.json"))
    if str(name) not in shipped:
        raise BadInput(
            f"no atlas of {str(name)!r} ships with qkscope: take {' or '.join(shipped)}, or the "
            "folder of one that you made with `qkscope atlas`."
        )
    return _read(path)


def known_rules(weights: str) -> dict[Head, Rule]:
    """By head of a shipped atlas its rule; empty where none ships for these weights."""
    atlas = known_atlas(weights)
    return {} if atlas is None else atlas.rules()


@cache
def known_atlas(weights: str) -> Atlas | None:
    """The shipped atlas of a model.

    Parameters
    ----------
    weights : hash of the model's weights.
    """
    for path in sorted(_FOLDER.glob("atlas-*.json")):
        made = json.loads(path.read_text("utf-8"))["made"]
        if made["asked"]["weights"] == weights:
            return _read(path)
    return None


@cache
def _read(path: Path) -> Atlas:
    """Read an atlas that ships."""
    stored = json.loads(path.read_text("utf-8"))
    made = stored["made"]
    atlas = Atlas(
        "atlas",
        {"heads": stored["heads"], "rules": _unpacked(stored["rules"])},
        arrays={"classes": read_classes(stored["classes"])},
        model=made["asked"]["model"],
        answer=made["answer"],
        provenance=made,
    )
    rules = atlas.rules()
    heads = [{**row, "rule": str(rules[Head.parse(row["head"])])} for row in stored["heads"]]
    return replace(atlas, tables={**atlas.tables, "heads": heads})


def _packed(value: Any) -> Any:
    """Lists of class numbers as bits of one number, in hexadecimal."""
    if isinstance(value, Mapping):
        return {key: _bits(x) if key == "classes" else _packed(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_packed(x) for x in value]
    return value


def _bits(numbers: Sequence[int]) -> str:
    return f"{sum(1 << number for number in numbers):x}"


def _unpacked(value: Any) -> Any:
    """Class numbers from what `_packed` gives."""
    if isinstance(value, Mapping):
        return {key: _numbers(x) if key == "classes" else _unpacked(x) for key, x in value.items()}
    return [_unpacked(x) for x in value] if isinstance(value, list) else value


def _numbers(bits: str) -> list[int]:
    number = int(bits, 16)
    return [i for i in range(number.bit_length()) if number >> i & 1]


def write_shipped(atlas: Atlas, path: Path, made: Mapping[str, Any]) -> None:
    """Write an atlas as one file, with what made it."""
    heads = [
        {name: round(x, 4) if isinstance(x, float) else x for name, x in row.items()}
        for row in atlas.tables["heads"]
    ]
    for row in heads:
        del row["rule"]  # which the rule itself says
    stored = {
        "made": dict(made),
        "classes": write_classes(atlas.arrays["classes"]),
        "heads": heads,
        "rules": _packed(atlas.tables["rules"]),
    }
    lines = [f'"{name}": {_lines(value)}' for name, value in stored.items()]
    path.write_text("{" + ",\n".join(lines) + "}\n", "utf-8")


def _lines(value: Any) -> str:
    """JSON with a row of a table on each line."""
    if not isinstance(value, list):
        return json.dumps(value, ensure_ascii=False)
    rows = [json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in value]
    return "[\n" + ",\n".join(rows) + "]"


def write_classes(classes: Int[Tensor, " v"]) -> str:
    """Class numbers of all tokens as text: bytes, compressed, in base 64.

    >>> read_classes(write_classes(torch.tensor([3, 1, 1]))).tolist()
    [3, 1, 1]
    """
    raw = bytes(classes.tolist())
    return base64.b64encode(zlib.compress(raw, 9)).decode("ascii")


def read_classes(text: str) -> Int[Tensor, " v"]:
    """Read what `write_classes` gives."""
    return torch.tensor(list(zlib.decompress(base64.b64decode(text))))


# ---------------------------------------------------------------------- a look beside its rule


def departure(rule: Rule, ids: Int[Tensor, " t"], row: Float[Tensor, " t"], key: int) -> str:
    """Where a look departs from a head's rule, in a sentence; empty where it does not.

    Parameters
    ----------
    rule : of the head.
    ids : the prompt up to the query.
    row : the head's attention from its last token.
    key : the token looked at.
    """
    says = rule.attention(ids)[-1]
    gives = float(row[key])
    expected = float(says[key])
    if abs(gives - expected) <= _DEPARTS:
        return ""
    less = "less" if gives > expected else "more"
    return (
        f"Atlas: on plain text its rule ({rule.name}) gives this key {expected:.0%}, "
        f"{less} than the {gives:.0%} here."
    )


def known_departure(
    weights: str, head: Head, ids: Sequence[int], row: Float[Tensor, " t"], key: int
) -> str:
    """`departure` from the rule of an atlas that ships; empty where none does.

    Parameters
    ----------
    weights : hash of the model's weights.
    head : that looks.
    ids : the prompt up to the query.
    row : the head's attention from its last token.
    key : the token looked at.
    """
    rule = known_rules(weights).get(head)
    return "" if rule is None else departure(rule, torch.tensor(list(ids)), row.cpu(), key)
