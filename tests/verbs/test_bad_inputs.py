"""Bad input that a user could not see otherwise: a wrong model, token, head, file or contrast. It
is answered by one sentence that says what to do, exit code 2, nothing on stdout, and nothing left
behind.

In the arguments OUT is a folder that is not there, FULL one with other files, FIT a finished fit
whose model is gone, MODEL a tiny model, and NAME.jsonl files of `FILES`; what is wrong in files of
your own is in test_jsonl.py.
"""

from pathlib import Path

import pytest
import torch

import qkscope as qk
from qkscope import BadInput, tasks
from qkscope.heads import Head
from qkscope.model.scope import Scope
from qkscope.verbs.decompose import decompose

FILES = {
    "empty.jsonl": "",
    "plain.txt": "hat jam",
}

COMMANDS = {
    # which verb, which task
    "heads bindng": "there is no task 'bindng'",
    "heads none.jsonl": "none.jsonl cannot be read",
    # which model
    "heads binding --model MODEL --device cuda:99": "cuda",
    "heads empty.jsonl": "holds no examples",
    # decompose and swap
    "decompose binding --heads 18.6 --out OUT": "'18.6' is not a head",
    "decompose binding --heads L9H0 --out OUT --model MODEL": "L9H0 does not exist",
    "decompose binding --heads L1H1 --out OUT --contrasts a": "no contrast 'a'",
    "decompose binding --heads L1H1 --out OUT --center query": "--center is not for binding: Of a .jsonl file",
    "swap none": "none is not a folder that decompose wrote",
    "swap FIT --heads L0H0": "was not fitted at L0H0: there is L1H3, L0H1",
    # why
    "why hat --head L1H0 --model MODEL": "the prompt has one token",
    "why hat:_A --head L1H0 --query 1 --key 2 --model MODEL": "token 2 stands after the query",
    "why hat:_A --key 1 --model MODEL": "a key is asked about with a head",
    "why hat:_A --head L1H0 --model MODEL --draws 100000000": "draws of why should be at most 1000000",
    "why hat:_A --circuit --export /nope/x.json": "x.json cannot be written: there is no folder /nope",
    "why hat:_A --model=": "--model is empty: name a model, or leave it out for smollm2-135m",
    "demo -n 200000": "demo takes at most 10000 prompts, but got 200000",
    # trace
    "trace": "name a task, or one prompt with --prompt, and not both",
    "trace python plain.txt": "python is text, and trace takes a task or a prompt: for heads on text use"
    " qkscope atlas python plain.txt",
    "trace binding ioi": "binding is a task: name it alone",
    "trace bindng": "there is no task 'bindng'",
    "trace binding --heads L0H1": "only the embedding writes: trace a later head",
    "trace binding --key 3": "key is for one prompt, not for a task",
    "trace binding --heads L1H3 --feature FIT": "--feature is DIR:CONTRAST",
    "trace --model MODEL --heads L1H0 --prompt hat:_A --key 2 --versus 2": "token 2 cannot be compared with itself",
    # weights, features without labels, pages
    "atlas binding --out OUT": "binding is a task",
    "view FULL --port 8000": "model, fit and port are for the live page: ask for it",
    "schema nonsense": "there is no schema of 'nonsense'",
}

# Python, with qk for qkscope; scope is of MODEL, and fit, basis, lex and units are of it (see
# `names`).
CALLS = {
    # a model, its tokens
    "qk.Scope.from_model(torch.nn.Linear(2, 2))": "a model of transformers can be looked into, but got Linear.",
    'scope.encode([""])': "the prompt is empty",
    "scope.encode([])": "a batch holds one prompt at least",
    'scope.place("hat jam", 10**30)': "is not there: the prompt has 2, 0 to 1",
    'scope.attention("hat jam", "L1H0", query=10**24)': "is not there: the prompt has 2, 0 to 1",
    'scope.generate("hat jam", 10**30)': "max_new_tokens of Scope.generate should be at most 1000000",
    'qk.Scope.load("")': "the name of the model is empty",
    'qk.Result.read("x" * 10_000)': "a name is longer than files have: xxx",
    'inside(scope.replace(0, -1), scope.encode, ["hat jam"])': "this model has no token -1: its ids are 0 to",
    r'inside(scope.replace(0, "\ud800"), scope.encode, ["hat"])': "half a surrogate pair",
    # finding and fitting
    'qk.decompose(scope, task, "L1H3", 10**24)': "n of decompose should be at most 1000000",
    'qk.atlas(scope, [f"zork{i} " * 40 for i in range(20)])': "most words of these 20 texts have none",
    'qk.decompose(scope, task, "L1H3", 8, rank=0)': "rank is 'energy', 'null' or a number from 1 to 16, but got 0",
    'qk.decompose(scope, task, "L1H3", 8, contrasts=["box", "box"])': "no contrast, or one that is named twice",
    "qk.sums.Subspace(2 * torch.eye(4), torch.ones(4), torch.eye(4), 2)": "the columns of U are not orthonormal",
    'fit["order", "L0H0"]': "nothing was fitted for 'order' at L0H0",
    # swaps and splits
    "qk.swap(scope, units)": "there is nothing to swap: give a fit",
    "qk.swap(scope, units, fit, sizes=[99])": "a curve of 99 dimensions does not fit into a head of 16.",
    # weights
    "qk.sums.alignment(basis, lex)": "L1H3 is not in this singular basis",
    'qk.sums.thin_svd(torch.full((2, 3), float("nan")), torch.ones(2, 3))': "a matrix with NaN or infinite entries",
    # who wrote it, and why
    'qk.trace(scope, task, "L1H3", feature=pre)': "the feature was fitted in pre_rope",
}


@pytest.fixture(scope="module")
def manifest(model, tmp_path_factory) -> str:
    """The manifest of a finished fit, its model said to be gone: nothing may be loaded to answer."""
    out = tmp_path_factory.mktemp("fits") / "fit"
    heads = [Head(1, 3), Head(0, 1)]
    decompose(
        Scope.load(model, device="cpu"),
        tasks.binding(3),
        heads,
        8,
        out=out,
        contrasts=["order"],
        batch_size=4,
    )
    return (out / "manifest.json").read_text().replace(str(model), "/nowhere/model")


@pytest.fixture
def place(manifest, model, tmp_path, monkeypatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    for folder, name, text in (("FULL", "thesis.tex", ""), ("FIT", "manifest.json", manifest)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text)
    (tmp_path / "MODEL").symlink_to(model)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_a_bad_command_gets_a_sentence_before_a_model_is_loaded(place, qkscope, command):
    before, arguments = (
        sorted(place.rglob("*")),
        [word.replace("_", " ") for word in command.split()],
    )
    nowhere = arguments[0] in ("heads", "decompose", "atlas", "sparsity", "svd", "trace", "why")
    nowhere = nowhere and "--model" not in command and "--fit" not in arguments
    code, out, said = qkscope(*arguments, *(["--model", "/nowhere/model"] if nowhere else []))
    assert (code, out) == (2, "")
    assert COMMANDS[command] in said
    assert "Traceback" not in said
    if said.startswith("qkscope: "):  # ours; the others are the option parser's
        assert len(said.strip().splitlines()) == 1
        assert said.strip().endswith(".")
    assert sorted(place.rglob("*")) == before, "something was left behind"


def inside(block, call, *arguments):
    """What a call gives in a ``with`` block."""
    with block:
        return call(*arguments)


@pytest.fixture(scope="module")
def names(model) -> dict[str, object]:
    """What the calls of the table may name."""
    scope, task = Scope.load(model, device="cpu"), tasks.binding(3)
    options = {"contrasts": ["order"], "batch_size": 8}
    pre = qk.decompose(scope, task, "L1H3", 8, space="pre_rope", **options)["order", "L1H3"]

    fit = qk.decompose(
        scope, task, ["L1H3", "L0H1"], 8, contrasts=["order", "lexical"], batch_size=8
    )
    return {
        "qk": qk, "torch": torch, "tasks": tasks, "scope": scope, "task": task, "fit": fit, "units": task.test(4),
        "basis": qk.sums.singular_basis(scope, ["L0H1"]), "lex": fit["lexical", "L1H3"],
        "pre": pre, "inside": inside,
    }  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_a_bad_call_gets_the_same_kind_of_sentence(place, names, call):
    before = sorted(place.rglob("*"))
    with pytest.raises(BadInput) as refused:
        eval(call, dict(names))  # our own table
    said = str(refused.value)
    assert CALLS[call] in said
    assert said.endswith(".")
    assert "\n" not in said
    assert sorted(place.rglob("*")) == before, "something was left behind"
