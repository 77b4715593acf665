"""Who writes for the induction head of ``nano:mixed`` over its sixteen steps:
papers/docs/figures/nano/trace-steps.png.

``python bench/nano_trace.py`` takes less than a minute on a CPU. The head is the best one
on induction at the last step; a writer's part is its value in the relative logit of the right key,
mean over 64 test prompts. The numbers are printed as JSON.
"""

from __future__ import annotations

import json

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import qkscope as qk
from qkscope.model.load import nano_steps
from qkscope_papers.reports import REPORTS

FIGURE = REPORTS / "figures" / "nano" / "trace-steps.png"
PROMPTS = 64
COLOURS = {
    "L0H0": "#0072B2",
    "L0H1": "#E69F00",
    "L0H2": "#009E73",
    "L0H3": "#CC3311",
    "M0": "#7B3FA0",
    "embedding": "#888888",
}


def measure() -> dict:
    """By step: attention on the right key, the relative logit, and every writer's part of it on
    both sides.
    """
    task = qk.tasks.induction()
    head = qk.find_heads(qk.Scope.load("nano:mixed"), task, n=PROMPTS).tables["heads"][0]["head"]
    rows = []
    for step in nano_steps("mixed"):
        found = qk.trace(
            qk.Scope.load(f"nano:mixed@{step}"), task, head, PROMPTS, whole=False, progress=False
        )
        values = {side: {} for side in ("key", "query")}
        for row in found.tables["writers"]:
            values[row["side"]][row["writer"]] = row["value"]
        cut = next(
            row
            for row in found.tables["edges"]
            if (row["side"], row["kind"], row["by"], row["k"]) == ("key", "cut", "share", 2)
        )
        check = found.tables["check"][0]
        rows.append(
            {
                "step": step,
                **{name: check[name] for name in ("attention", "accuracy", "logit", "cancels")},
                "cut": cut["accuracy"],
                **values,
            }
        )
    return {"head": head, "rows": rows}


def draw(found: dict) -> None:
    """Two panels, one for each side; steps stand evenly: they are dense where something happens."""
    rows = found["rows"]
    places = range(len(found["rows"]))
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    for panel, side in zip(panels, ("key", "query"), strict=True):
        logit = [row["logit"] for row in rows]
        panel.fill_between(places, logit, color="#EEEEEE", label="the logit, their sum")
        for writer, colour in COLOURS.items():
            panel.plot(
                places,
                [row[side][writer] for row in rows],
                color=colour,
                marker="o",
                markersize=3,
                label=writer,
            )
        panel.axhline(0, color="#444444", linewidth=0.6)
        panel.set_xticks(list(places), [str(row["step"]) for row in rows], rotation=60, fontsize=8)
        panel.set_title(f"who writes its {side}", fontsize=11)
        panel.set_xlabel("step of training (not to scale)")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(f"part of {found['head']}'s logit of the right key\nover the other words")
    panels[0].legend(frameon=False, fontsize=8, loc="upper left")
    figure.savefig(FIGURE, dpi=110)


if __name__ == "__main__":
    made = measure()
    draw(made)
    print(json.dumps(made, indent=1))
