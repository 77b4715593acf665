"""Facts about the verbs on a tiny random model: they equal what is computed by hand, and read back
what they wrote.
"""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch

from qkscope import BadInput, tasks
from qkscope.examples import Example, Key
from qkscope.findings.fit import load_fit, read_job
from qkscope.findings.task_batches import batches_of, unit_runner
from qkscope.heads import Head
from qkscope.model.scope import Scope
from qkscope.results.result import Result
from qkscope.sums.intervals import wilson
from qkscope.texts.task import ANSWER, Task
from qkscope.texts.word_pools import OBJECTS
from qkscope.verbs.decompose import decompose
from qkscope.verbs.find_heads import find_heads

HEADS = ["L1H3", "L0H1", "L1H0"]  # two layers, out of order, two of one key head's group apart


@pytest.fixture(scope="module")
def task() -> Task:
    return tasks.binding(4)


@pytest.fixture(scope="module")
def fit(scope: Scope, task: Task):
    return decompose(scope, task, HEADS, 40, batch_size=16, replicates=19)


def one(scope: Scope, example: Example, heads=HEADS):
    """Queries (h, d) and keys as each head reads them (h, k, d), of one example alone."""
    captured = scope.capture_inputs(scope.encode([example]), heads=heads)
    return captured.q[0].double(), captured.k[0, captured.kv_of_head].double()


def outer(q, k):
    return q[:, :, None] * k[:, None, :]


def close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=1e-5 * float(wanted.abs().max()), rtol=0)


def own_file(path: Path, words=OBJECTS[:30]) -> Path:
    """A task of one's own: two lines of a group each."""
    keys = [{"text": "A", "labels": {"mine": 1}}, {"text": "B", "labels": {"mine": -1}}]
    lines = [
        {"prompt": f"{w} : A hat : B {w} :", "keys": keys, "group": i // 2}
        for i, w in enumerate(words)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.mark.parametrize("batch_size", [1, 3, 16])
@pytest.mark.parametrize("contrast", ["order", "lexical"])
def test_batches_keep_a_unit_together_and_come_in_a_fixed_order(scope, task, batch_size, contrast):
    units = task.fit(contrast, 11)
    batches = batches_of(units, batch_size)
    assert sorted(i for batch in batches for i in batch) == list(range(11))
    assert [i for batch in batches for i in batch] == [
        i for batch in batches_of(units, 4) for i in batch
    ]
    assert max(sum(len(units[i]) for i in batch) for batch in batches) <= max(
        batch_size, len(units[0])
    )
    for batch, indices in zip(map(unit_runner(scope, units, HEADS), batches), batches, strict=True):
        rows = list(zip(batch.unit.tolist(), batch.member.tolist(), strict=True))
        assert rows == [(i, m) for i in indices for m in range(len(units[i]))]


@pytest.mark.parametrize("own_query", [False, True])
def test_lexical_meets_a_query_with_its_own_key_and_the_copys_or_each_with_its_own(
    scope, own_query
):
    task, total = tasks.binding(4, **({"lexical": "own_query"} if own_query else {})), 0
    for first, copy in task.fit("lexical", 10):
        place = [key.label("lexical") for key in first.keys].index(1)
        (q_o, k_o), (q_c, k_c) = one(scope, first), one(scope, copy)
        k_o, k_c = k_o[:, place], k_c[:, place]
        across = (outer(q_o, k_o - k_c) + outer(q_c, k_c - k_o)) / 2
        total = total + (outer(q_o, k_o) - outer(q_c, k_c) if own_query else across)
    found = decompose(scope, task, HEADS, 10, contrasts=["lexical"], replicates=3)
    close(found.sums["lexical"].delta("lexical"), total / 10)


def test_order_averages_over_pairs_and_its_subspace_is_of_the_centred_contrast(scope, task):
    right, wrong, queries, k_right, k_wrong = 0, 0, 0, 0, 0
    for (example,) in task.fit("order", 10):
        q, k = one(scope, example)
        labels = torch.tensor([key.label("order") for key in example.keys])
        plus, minus = k[:, labels > 0].sum(1), k[:, labels < 0].sum(1)
        right, wrong = right + outer(q, plus) / 10, wrong + outer(q, minus) / 30
        queries, k_right, k_wrong = queries + q / 10, k_right + plus / 10, k_wrong + minus / 30
    found = decompose(scope, task, HEADS, 10, contrasts=["order"], replicates=3)
    close(found.sums["order"].delta("order"), right - wrong)
    centred = right - wrong - outer(queries, k_right - k_wrong)
    for i, head in enumerate(HEADS):
        subspace = found["order", head]
        made, scale = (
            subspace.U @ torch.diag(subspace.S) @ subspace.V.mT,
            float((right - wrong)[i].abs().max()),
        )
        torch.testing.assert_close(made, centred[i], atol=1e-5 * scale, rtol=0)
    # in the first layer the query, a colon at a fixed place, never varies: what centring leaves is
    # rounding
    assert found["order", "L0H1"].rank == 1
    assert found["order", "L0H1"].controls.verdict != "interaction"


def test_options_choose_contrasts_ranks_and_centring(scope, task):
    """A rank above the null is of the null that fits the centring; one direction is always kept."""
    job = {"contrasts": ["box", "order"], "replicates": 39}
    chosen = decompose(
        scope, task, HEADS, 40, rank={"box": 3, "order": "null"}, center={"order": "none"}, **job
    )
    assert list(chosen) == [(name, Head.parse(head)) for name in ("box", "order") for head in HEADS]
    assert chosen["box", "L1H3"].rank == 3
    assert {row["center"] for row in chosen.table()} == {"none"}
    close(chosen["order", "L1H3"].S, torch.linalg.svdvals(chosen.delta("order", "L1H3")))
    centred = decompose(scope, task, HEADS, 40, rank="null", **job)
    for fit, name, kind in (
        (centred, "order", "interaction_rank"),
        (centred, "box", "rank_null"),
        (chosen, "order", "rank_null"),
    ):
        for head in HEADS:
            assert fit[name, head].rank == max(getattr(fit[name, head].controls, kind), 1)


def test_a_contrast_that_is_nothing_at_a_head_says_so_and_leaves_the_others_alone(scope, task, fit):
    """In the first layer a box's key does not know its word: the copy's key is the same one, and
    lexical is zero.
    """
    found = fit["lexical", "L0H1"]
    assert float(found.S.max()) < 1e-6 < float(fit["lexical", "L1H3"].S.max())
    assert (found.rank, found.controls.rank_99, found.controls.verdict) == (1, 0, "not above null")


def shared_file(folder: Path) -> Path:
    """Lines of contrast a, of b and of both, in groups of two, and one prompt that three groups
    ask.
    """
    words = OBJECTS[-2:]

    def line(number: int, member: int, contrasts: str) -> dict[str, object]:
        labels = [dict.fromkeys(contrasts, sign) for sign in (1, -1)]
        keys = [{"text": word, "labels": own} for word, own in zip(words, labels, strict=True)]
        said = OBJECTS[min(2 * number + member, 36)]  # the last three groups ask alike
        prompt = f"{said}: O\n{words[0]}: A\n{words[1]}: B\n{said}:"
        return {"prompt": prompt, "keys": keys, "group": number, "use": "fit"}

    lines = [line(i, m, ("a", "ab", "b")[i % 3]) for i in range(18) for m in (0, 1)]
    lines += [line(i, 0, "ab") for i in (18, 19, 20)]
    path = folder / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_contrast_has_the_sums_that_it_has_alone(scope, tmp_path):
    """Nulls, folds, units and covariances included; the model's own rounding apart, as batches are
    others.
    """
    for task in (tasks.binding(4), tasks.from_jsonl(shared_file(tmp_path))):
        options = {"batch_size": 5, "replicates": 19, "progress": False}
        both = decompose(scope, task, "L1H3,L0H1", 24, **options)
        for name in task.contrasts:
            alone = decompose(scope, task, "L1H3,L0H1", 24, contrasts=[name], **options)
            mine, theirs = both.sums[name].tensors(), alone.sums[name].tensors()
            for what, wanted in theirs.items():
                torch.testing.assert_close(
                    mine[what], wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()), msg=what
                )
            for found, row in zip(
                [r for r in both.table() if r["contrast"] == name], alone.table(), strict=True
            ):
                assert (found["verdict"], found["units"]) == (row["verdict"], row["units"])


def test_a_prompt_runs_once_for_all_contrasts(scope, task, monkeypatch):
    seen: list[str] = []

    def capture(self, encoded, *given, real=Scope.capture_inputs, **named):
        seen.extend(example.text for example in encoded.examples)
        return real(self, encoded, *given, **named)

    monkeypatch.setattr(Scope, "capture_inputs", capture)
    decompose(scope, task, "L0H1", 12, contrasts=["box", "lexical"], replicates=3, progress=False)
    assert len(seen) == len(set(seen)) == 3 * 12, "a prompt, and the copy of each contrast"


def test_a_folder_of_another_job_is_refused(scope, task, tmp_path):
    out = tmp_path / "fit"
    decompose(scope, task, [Head(0, 0)], 8, out=out, contrasts=["order"])
    for other, says in (
        ({"n": 9}, "n differ"),
        ({"heads": [Head(0, 1)]}, "heads differ"),
        ({"space": "query_frame"}, "space differ"),
        ({"task": tasks.binding(4, seed=1)}, "task_seed differ"),
    ):
        job = {
            "scope": scope,
            "task": task,
            "heads": [Head(0, 0)],
            "n": 8,
            "contrasts": ["order"],
            **other,
        }
        with pytest.raises(BadInput, match=f"holds another fit .*{says}"):
            decompose(**job, out=out)


def test_what_decompose_writes_load_reads(scope, task, tmp_path):
    """The fit it returned, to the bit; and `write` writes such a folder of a fit that was made
    without one.
    """
    cuts = {"rank": {"order": 2, "lexical": "null"}, "center": {"order": "none"}}
    job = {
        "contrasts": ["order", "lexical"],
        "batch_size": 4,
        "replicates": 9,
        "progress": False,
        **cuts,
    }
    kept = decompose(scope, task, "L0H1,L1H2", 16, **job, out=tmp_path / "out")
    alone = decompose(scope, task, "L0H1,L1H2", 16, **job)
    assert alone.write(tmp_path / "written") == tmp_path / "written"
    for fit, folder in ((kept, "out"), (alone, "written")):
        read = load_fit(tmp_path / folder, scope)
        assert list(read) == list(fit)
        assert (read.tables, read.answer, read.seconds, read.seed) == (
            fit.tables,
            fit.answer,
            fit.seconds,
            fit.seed,
        )
        assert read.provenance == json.loads(json.dumps(fit.provenance))
        for which in fit:
            assert read[which].rank == fit[which].rank
            for part in ("U", "S", "V", "cov_k"):
                assert torch.equal(getattr(read[which], part), getattr(fit[which], part))
        for name, sums in fit.sums.items():
            assert read.sums[name].manifest() == json.loads(json.dumps(sums.manifest()))
            assert all(
                torch.equal(x, read.sums[name].tensors()[part])
                for part, x in sums.tensors().items()
            )
        assert load_fit(tmp_path / folder).to_json() == fit.to_json()
    assert read_job(tmp_path / "out") == read_job(tmp_path / "written")
    again = decompose(scope, task, "L0H1,L1H2", 16, **job, out=tmp_path / "written")
    assert again.tables == kept.tables
    with pytest.raises(BadInput, match="holds no sums"):
        dataclasses.replace(kept, sums={}).write(tmp_path / "empty")
    Result("toy", {}).write(tmp_path / "toy")
    with pytest.raises(BadInput, match="is not a folder that decompose wrote"):
        load_fit(tmp_path / "toy", scope)


def test_scores_are_those_of_the_models_own_attention_with_wilsons_interval(scope, model):
    """Keys labelled 0 are no candidates, however much attention they get."""
    examples = []
    for (example,) in tasks.binding(4, "sentence", filler=3).choose(6):
        keys = [
            Key(key.span, {ANSWER: key.label(ANSWER) if i else 0})
            for i, key in enumerate(example.keys)
        ]
        keys[1] = Key(keys[1].span, {ANSWER: 1})
        examples.append(Example(text=example.text, keys=keys))
    task = Task("mine", {}, lambda use, contrast, n: [(example,) for example in examples])
    rows = {row["head"]: row for row in find_heads(scope, task, 6, batch_size=4).top()}
    eager, scores = Scope.load(model, device="cpu", attn="eager"), []
    for example in examples:
        encoded = scope.encode([example])
        with torch.no_grad():
            attention = eager.model(**encoded.inputs, output_attentions=True).attentions
        whole = torch.stack(attention)[:, 0, :, -1].flatten(0, 1)
        keys, right = encoded.places.keys[0, 1:], encoded.labels[ANSWER][0, 1:] > 0
        named = whole[:, keys]
        hits = right[named.argmax(-1)], torch.isin(whole.argmax(-1), keys[right])
        mass = named.sum(-1)
        scores.append(
            torch.stack([*(hit.double() for hit in hits), named[:, right].sum(-1) / mass, mass])
        )
    wanted = torch.stack(scores).mean(0)
    for i, head in enumerate(scope.heads()):
        row = rows[str(head)]
        found = [row[name] for name in ("accuracy", "row_accuracy", "ratio", "mass")]
        assert found == pytest.approx(wanted[:, i].tolist(), abs=1e-5)
        assert (row["low"], row["high"]) == wilson(round(6 * row["accuracy"]), 6)
    for hits, n in ((0, 10), (3, 10), (10, 10), (57, 64)):
        low, high = wilson(hits, n)
        for p in (low, high):
            if 0 < p < 1:
                assert abs(hits / n - p) / (p * (1 - p) / n) ** 0.5 == pytest.approx(1.96)
        assert low <= hits / n <= high


def test_words_that_share_a_token_are_refused_with_the_tokens(scope):
    ranking = find_heads(scope, tasks.binding(2, boxes=["A-A", "B-A", "C-A", "D-A"]), 2)
    assert len(ranking.above(0)) == 8, "several tokens a box are no problem: the last one counts"
    glued = Example(text="hatA", keys=[Key((0, 3), {ANSWER: 1}), Key((3, 4), {ANSWER: -1})])
    with pytest.raises(BadInput, match=r"two keys share token 0, .*the tokens are"):
        find_heads(scope, Task("mine", {}, lambda *_: [(glued,)]), 1)


def test_where_no_head_does_it_the_answer_says_so_and_none_is_decomposed(qkscope, tmp_path):
    untrained = ["--model", "nano:mixed@0"]
    code, out, err = qkscope("heads", "binding", "--n", 24, *untrained, "--out", tmp_path / "run")
    assert code == 0, err
    assert out.startswith("No head reaches 30%: L")
    assert "No head reaches 30%: L" in (tmp_path / "run" / "report.html").read_text()
    said = out.partition("Next: qkscope ")[2].split()
    assert set(said) == {"heads", "binding", "--form", "sentence", *untrained}


def test_a_file_of_your_own_goes_through_every_verb_and_a_changed_one_is_refused(
    qkscope, model, tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    own_file(Path("mine.jsonl"))
    code, out, err = qkscope("heads", "mine.jsonl", "--model", model, "--json")
    assert code == 0, err
    assert json.loads(out)["tables"]["heads"][0]["chance"] == 0.5
    assert "mine.jsonl holds 5 examples to choose, fewer than 256: taking all." in caplog.text
    job = ["decompose", "mine.jsonl", "--heads", "L1H3,L0H1", "--out", "fit", "--center", "query"]
    said = {}
    for arguments in (
        [*job, "--model", model],
        ["swap", "fit"],
        ["why", "hat : A cat : B hat :", "--fit", "fit"],
    ):
        code, out, err = qkscope(*arguments, "--json")
        assert code == 0, err
        said[arguments[0]] = json.loads(out)["tables"]
    own_file(Path("mine.jsonl"), OBJECTS[:28])
    code, _, err = qkscope(*job, "--model", "/nowhere/model")
    assert (code, "fit holds another fit (asked differ)" in err) == (2, True)
    os.remove("mine.jsonl")  # the folder keeps what it was made from
    code, after, err = qkscope("swap", "fit", "--json")
    assert code == 0, err
    assert json.loads(after)["tables"] == said["swap"]
    own_file(Path("fit/mine.jsonl"), OBJECTS[:28])
    for arguments in (["swap", "fit"], ["why", "hat :", "--fit", "fit"]):
        code, out, err = qkscope(*arguments)
        assert (code, out) == (2, "")
        assert "fit/mine.jsonl has changed since fit was made from it: run decompose again" in err
