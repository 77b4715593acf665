"""Rows of figure 9 on Qwen2.5-Coder-1.5B from the swaps that ``bench/three_models.py`` keeps.

Its binding head was swapped there with our estimators, 512 prompts on a GPU, in the same prompts
and by the same code as figure 9's; ``python papers/scripts/qwen_rows.py`` puts what that decides
into the ledger, without a run of its own. The paper's estimators were not run on this model.
"""

from __future__ import annotations

import json
from typing import Any

from qkscope.results.claims import Claim
from qkscope_papers.reports import LEDGER, ROOT

MODEL = "qwen2.5-coder-1.5b"
STORE = ROOT / "bench" / "docs" / "three-models.json"
NAME = f"lee2026/fig9@{MODEL}"
_FROM = "swaps of bench/docs/three-models.json"


def qwen_claims(swaps: list[dict[str, Any]]) -> list[Claim]:
    """What the kept swaps of its binding head decide."""
    at = {row["condition"]: row for row in swaps}
    both = at["both"]
    random = at["random_both"]
    claims = [
        Claim("swapping both moves the majority of the attention (shift, our estimators; control: random)", "",
              both["shift"], random["shift"], "ours > 0.5", both["shift_low"], both["shift_high"]),
        Claim("random subspaces have a negligible effect (shift, our estimators; control: swapping both)", "",
              random["shift"], both["shift"], "ours < max(0.05, 0.1 * control)", random["shift_low"],
              random["shift_high"]),
    ]  # fmt: skip
    claims[1:1] = [
        Claim(f"{name} alone moves some attention (shift over random, our estimator)", "", at[name]["gain"], None,
              "ours > 0.05", at[name]["gain_low"], at[name]["gain_high"])
        for name in ("order", "lexical")
    ]  # fmt: skip
    return claims


def qwen_entry(kept: dict[str, Any]) -> dict[str, Any]:
    """The ledger's entry."""
    how, _, date = kept["made"]["swaps"].rpartition(", ")
    claims = qwen_claims(kept["swaps"]["swap"])
    head = kept["swaps"]["swap"][0]["head"]
    return {
        "model": MODEL,
        "seconds": 0.0,
        "answer": f"The swaps of {head} with our estimators ({how}); figure 9 itself was not run.",
        "claims": [claim.to_json() for claim in claims],
        "command": _FROM,
        "hardware": how,
        "date": date,
        "preset": "default",
        "picture": False,
    }


if __name__ == "__main__":
    known = json.loads(LEDGER.read_text())
    known[NAME] = qwen_entry(json.loads(STORE.read_text())[MODEL])
    LEDGER.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
