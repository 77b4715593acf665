"""Everything a user can get wrong, as commands and calls, and a piece of the sentence each is answered with.

``tests/test_bad_inputs.py`` runs them; ``python docs/generate.py errors`` writes docs/errors.md from the sentences. In
the arguments, OUT is a folder that is not there, FULL one with other files, FIT a finished fit whose model is gone,
SHARD one of its shards, MODEL a tiny model, and NAME.jsonl, NAME.txt, NAME.safetensors are files of `write_files`.
"""

from __future__ import annotations

import json
from pathlib import Path

_KEY = {"text": "A", "labels": {"mine": 1}}
_OTHER = {"text": "B", "labels": {"mine": -1}}
FILES = {
    "broken.jsonl": '{"prompt": "A B", "keys": [',
    "list.jsonl": "[1, 2]",
    "fields.jsonl": json.dumps({"keys": [_KEY, _OTHER]}),
    "extra.jsonl": json.dumps({"prompt": "A B", "keys": [_KEY, _OTHER], "promt": 1}),
    "nokeys.jsonl": json.dumps({"prompt": "A B", "keys": []}),
    "positive.jsonl": json.dumps({"prompt": "A B", "keys": [_OTHER]}),
    "absent.jsonl": json.dumps({"prompt": "A B", "keys": [_KEY, {"text": "C", "labels": {"mine": -1}}]}),
    "twice.jsonl": json.dumps({"prompt": "A B A", "keys": [_KEY, _OTHER]}),
    "span.jsonl": json.dumps({"prompt": "A B", "keys": [{"span": [0, 99], "labels": {"mine": 1}}, _OTHER]}),
    "label.jsonl": json.dumps({"prompt": "A B", "keys": [{"text": "A", "labels": {"mine": 7}}, _OTHER]}),
    "use.jsonl": json.dumps({"prompt": "A B", "keys": [_KEY, _OTHER], "use": "train"}),
    "empty.jsonl": "\n\n",
}

_FIT = ["decompose", "binding", "--heads", "L1H1", "--out", "OUT"]

COMMANDS: list[tuple[list[str], str]] = [
    # ------------------------------------------------------------ which verb
    (["nonsense"], "No such command"),
    (["heads", "binding", "--nonsense"], "No such option"),
    (["heads"], "Missing argument"),
    # ------------------------------------------------------------ heads
    (["heads", "bindng"], "there is no task 'bindng'"),
    (["heads", "none.jsonl"], "none.jsonl cannot be read"),
    (["heads", "binding", "--form", "bullets"], "form is one of list, sentence, question"),
    (["heads", "binding", "--size", "0"], "number of entities in a prompt should be a whole number from 2 to 20"),
    (["heads", "filter", "--size", "14"], "word lists for 13 categories"),
    (["heads", "ioi", "--size", "3"], "--size is for binding"),
    (["heads", "pronoun", "--form", "sentence"], "--form is for binding"),
    (["heads", "binding", "--n", "0"], "number of examples should be a whole number at least 1"),
    (["heads", "binding", "--batch-size", "0"], "--batch-size is at least 1"),
    (["heads", "binding", "--threshold", "30"], "--threshold is a share"),
    (["heads", "binding", "--by", "fame"], "--by is one of accuracy, row_accuracy, ratio, mass"),
    (["heads", "binding", "--model", "/nowhere/model"], "/nowhere/model does not exist"),
    (["heads", "binding", "--model", "FULL"], "config.json"),
    (["heads", "binding", "--model", "none.gguf"], "none.gguf does not exist"),
    (["heads", "binding", "--model", "nano:nonsense"], "nonsense"),
    (["heads", "binding", "--model", "MODEL", "--dtype", "float99"], "dtype"),
    (["heads", "binding", "--model", "MODEL", "--device", "cuda:99"], "cuda"),
    # ------------------------------------------------------------ a file of your own
    (["heads", "broken.jsonl"], "broken.jsonl, line 1"),
    (["heads", "list.jsonl"], "list.jsonl, line 1"),
    (["heads", "fields.jsonl"], "fields.jsonl, line 1"),
    (["heads", "extra.jsonl"], "extra.jsonl, line 1"),
    (["heads", "nokeys.jsonl"], "nokeys.jsonl, line 1"),
    (["heads", "positive.jsonl"], "positive.jsonl"),
    (["heads", "absent.jsonl"], "absent.jsonl, line 1"),
    (["heads", "twice.jsonl"], "twice.jsonl, line 1"),
    (["heads", "span.jsonl"], "span.jsonl, line 1"),
    (["heads", "label.jsonl"], "label.jsonl, line 1"),
    (["heads", "use.jsonl"], "use.jsonl, line 1"),
    (["heads", "empty.jsonl"], "empty.jsonl holds no examples"),
    # ------------------------------------------------------------ decompose and merge
    (["decompose", "binding", "--heads", "18.6", "--out", "OUT"], "'18.6' is not a head"),
    (["decompose", "binding", "--heads", "", "--out", "OUT"], "no head was named"),
    (["decompose", "binding", "--heads", "L1H1"], "Missing option"),
    ([*_FIT, "--contrasts", "a"], "no contrast 'a'"),
    ([*_FIT, "--contrasts", ","], "no contrast was named"),
    ([*_FIT, "--contrasts", "order,order"], "is named twice"),
    ([*_FIT, "--space", "rope"], "there is no space 'rope'"),
    ([*_FIT, "--n", "-1"], "at least 1"),
    ([*_FIT, "--n", "many"], "valid integer"),
    ([*_FIT, "--batch-size", "0"], "at least 1"),
    ([*_FIT, "--center", "query"], "a file of your own"),
    ([*_FIT, "--shard", "5/4"], "a shard is i/n"),
    ([*_FIT, "--n", "4", "--shard", "1/4"], "cannot be shared among 4"),
    (["decompose", "binding", "--heads", "L1H1", "--out", "FULL"], "holds other things than a fit"),
    (["decompose", "binding", "--heads", "L1H1", "--out", "FULL/thesis.tex"], "holds other things than a fit"),
    (["decompose", "binding", "--heads", "L1H1", "--out", "/proc/nowhere"], "cannot be written"),
    (["decompose", "binding", "--heads", "L1H1", "--out", "FIT"], "holds another job"),
    ([*_FIT, "--model", "/nowhere/model"], "/nowhere/model does not exist"),
    (["decompose", "binding", "--heads", "L9H0", "--out", "OUT", "--model", "MODEL"], "L9H0 does not exist"),
    (["merge", "FULL", "--out", "OUT"], "is not a folder that decompose wrote"),
    (["merge", "FIT", "--out", "OUT"], "is no shard but a whole fit"),
    (["merge", "SHARD", "--out", "OUT"], "is missing: run it"),
    # ------------------------------------------------------------ swap and explain
    (["swap", "none"], "none is not a folder that decompose wrote"),
    (["swap", "FIT", "--heads", "L0H0"], "was not fitted at L0H0: there is L1H3, L0H1"),
    (["swap", "FIT", "--heads", "six"], "'six' is not a head"),
    (["swap", "FIT", "--n", "0"], "at least 1"),
    (["swap", "FIT", "--batch-size", "0"], "--batch-size is at least 1"),
    (["explain", "none", "hat:"], "none is not a folder that decompose wrote"),
    (["explain", "FIT", "hat:", "--head", "L0H0"], "was not fitted at L0H0"),
    (["explain", "FIT", "hat:", "--head", "L1H3,L0H1"], "is not a head"),
    (["explain", "FIT", "hat:", "--split", "fair"], "--split is one of sequential, average, oblique"),
    (["explain", "FIT", ""], "the prompt is empty"),
    # ------------------------------------------------------------ papers, toys, bench, demo, pages
    (["reproduce", "lee2025", "fig2"], "there is no paper 'lee2025'"),
    (["reproduce", "lee2026", "fig99"], "has no figure 'fig99'"),
    (["reproduce", "lee2026"], "no figure was named"),
    (["reproduce", "lee2026", "fig2", "--preset", "huge"], "there is no preset 'huge'"),
    (["reproduce", "lee2026", "fig2", "--device", "tpu"], "tpu"),
    (["reproduce", "lee2026", "fig2", "--out", "/proc/nowhere"], "cannot be written"),
    (["toy", "retrieval", "--ranks", "3;5", "--out", "OUT"], "ranks are whole numbers"),
    (["toy", "retrieval", "--variant", "odd", "--out", "OUT"], "variant"),
    (["toy", "retrieval", "--lr", "nan", "--out", "OUT"], "learning rate"),
    (["toy", "retrieval", "--steps", "0", "--out", "OUT"], "at least 1"),
    (["toy", "superposition", "--p", "0", "--out", "OUT"], "(0, 1]"),
    (["toy", "superposition", "--d-head", "11", "--out", "OUT"], "d_head"),
    (["train", "nano", "--steps", "0", "--out", "OUT"], "at least 1"),
    (["train", "nano", "--preset", "huge", "--out", "OUT"], "huge"),
    # ------------------------------------------------------------ weights, and features without labels
    (["svd", "--heads", "six"], "'six' is not a head"),
    (["svd", "--model", "MODEL", "--heads", "L9H0"], "L9H0"),
    (["sparsity", "iou", "--out", "OUT"], "there is no task 'iou'"),
    (["sparsity", "ioi", "--heads", "L0H0:END>NOWHERE", "--out", "OUT"], "NOWHERE"),
    (["sparsity", "ioi", "--draws", "0", "--out", "OUT"], "at least"),
    (["sparsity", "ioi", "--model", "nano:mixed", "--revisions", "7", "--out", "OUT"], "7"),
    (["discover", "none.txt", "--heads", "L0H0", "--out", "OUT"], "none.txt"),
    (["discover", "binding", "--heads", "six", "--out", "OUT"], "'six' is not a head"),
    (["atlas", "--n", "0", "--out", "OUT"], "at least"),
    (["bench", "--only", "nonsense"], "there is no bench row 'nonsense'"),
    (["demo", "--out", "/proc/nowhere/demo"], "cannot be written"),
    (["demo", "--out", "FULL"], "holds other files than a run"),
    (["view", "none"], "none"),
    (["view", "FULL"], "FULL"),
]


def write_files(folder: Path) -> None:
    """The broken files, and a folder that holds somebody's work."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "FULL").mkdir()
    (folder / "FULL" / "thesis.tex").write_text("")
