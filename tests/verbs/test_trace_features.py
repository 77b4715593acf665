"""Trace with a dictionary: parts sum in every kind of attention, planted pairs come first,
meaningless ones do not.
"""

import json
from collections import Counter

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import normalize

import qkscope as qk
from planted_model import READER, planted
from qkscope.errors import BadInput
from qkscope.findings.head_rows import HeadRows, Pass
from qkscope.findings.prompt_trace import PromptRun
from qkscope.heads import Head
from qkscope.linear.reader import Reader
from qkscope.linear.run import Parts
from qkscope.model.scope import Scope
from qkscope.show.blocks import blocks_of
from qkscope.verbs.trace.feature_pairs import PAIR_CUTS, FeatureSplit
from qkscope.verbs.trace.null_dictionaries import NULLS
from qkscope_papers.families import tiny_model, two_prompts

FAMILIES = ["gpt2", "gemma2", "olmo2", "gpt_oss", "deepseek_v3"]
PROMPT = "Words: hat jam kettle bell hat jam"


def random_dictionary(width, layer, seed=0, **more):
    rows = normalize(torch.randn(24, width, generator=torch.Generator().manual_seed(seed)), dim=1)
    return qk.Dictionary(rows, rows.T.contiguous(), layer, **{"k": 5, **more})


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_sum_to_the_logit_whatever_the_codes(family):
    scope = Scope.from_model(tiny_model(family), check=False)
    layer, (inputs, places) = scope.n_layers - 1, two_prompts(scope)
    head = next(head for head in scope.heads() if head.layer == layer)
    signs = torch.where(torch.arange(places.keys.shape[1]) == 0, 1, -1) * places.key_mask
    run = Reader(scope, [head]).record(inputs, places, layers=[layer - 1, layer])
    rows = HeadRows(run, head, signs)
    width = run.entered[layer].shape[-1]
    skip = torch.eye(width) / 2
    every = [
        (random_dictionary(width, layer), ("error", "bias")),
        (random_dictionary(width, layer - 1), ("error", "after", "bias")),
        (random_dictionary(width, layer - 1, splits="mlp"), ("error", "other writers", "bias")),
        (
            random_dictionary(width, layer - 1, splits="transcoder", skip=skip),
            ("error", "skip", "other writers", "bias"),
        ),
    ]
    for own, rest in every:
        split = FeatureSplit(rows, own)
        assert split.rest == rest
        if own.splits != "stream":
            written = next(
                p.values[:, 0] for p in run.stream(layer) if p.writers == [f"M{layer - 1}"]
            )
            assert torch.equal(split.target, written)
            assert torch.equal(split.x, written) is (own.splits == "mlp")
        codes = [split.coded, *(split.null(kind, 1) for kind in NULLS)]
        for terms, true in (
            (t, x) for coded in codes for t, x in zip(split.terms(coded), rows.logit(), strict=True)
        ):
            assert abs(float(terms.values.sum() - true)) < 2e-5 * float(terms.values.abs().max())


def test_a_long_prompt_in_pieces_gives_the_same(nano, monkeypatch):
    scope = nano
    own = random_dictionary(scope.model.config.hidden_size, 1)
    whole = qk.trace(scope, PROMPT, "L1H0", dictionary=own, draws=2)
    monkeypatch.setattr("qkscope.verbs.trace.feature_pairs._AT_ONCE", 1)  # key by key
    pieces = qk.trace(scope, PROMPT, "L1H0", dictionary=own, draws=2)
    for one, other in zip(
        whole.tables["feature_pairs"], pieces.tables["feature_pairs"], strict=True
    ):
        assert one["value"] == pytest.approx(other["value"], abs=1e-6)


def true_dictionary(scope):
    """A feature for every word, one for every word before, one for every place; a word before is
    twice as strong.
    """
    directions = scope.model.planted
    least = torch.cat(
        [
            torch.full((len(own),), size)
            for own, size in zip(directions, (0.6, 1.2, 0.6), strict=True)
        ]
    )
    rows = torch.cat(directions)
    return qk.Dictionary(rows, rows.T.contiguous(), READER.layer, threshold=least)


@pytest.mark.parametrize("seed", range(2))
def test_the_planted_pair_comes_first_and_with_no_copy(seed):
    writer = Head(seed % 2, seed % 3)
    scope = planted({writer: 0.3}, seed)
    own = true_dictionary(scope)
    found = qk.trace(scope, PROMPT, READER, dictionary=own, draws=10, seed=seed)
    word = scope.tokenizer.convert_tokens_to_ids("jam")
    first = found.table()[0]
    assert (first["query_feature"], first["key_feature"]) == (
        f"f{word}",
        f"f{word + len(scope.model.planted[0])}",
    )
    assert first["share"] > 0.5
    assert found.tables["check"][0]["sum_error"] < 1e-5
    ours, *copies = found.tables["copies"]
    assert [row["kind"] for row in copies] == list(NULLS)
    assert all(row["below"] for row in copies)
    assert ours["first"] > 1.5 * max(row["first_high"] for row in copies)
    assert "more than with any copy without meaning" in found.answer
    rows = [row for row in found.tables["feature_edges"] if row["kind"] == "dictionary"]
    edges = {(row["side"], row["edge"], row["k"]): row for row in rows}
    cut, back = edges["key", "ablated", 1], edges["key", "restored", 1]
    assert (cut["verdict"], back["verdict"]) == ("depends on", "shown")
    assert cut["after"] < cut["before"] / 2 < 0.8 * back["after"]
    assert edges["query", "ablated", 5]["after"] < 0.3
    meaningless = qk.trace(
        scope, PROMPT, READER, dictionary=random_dictionary(96, READER.layer), draws=2
    )
    assert meaningless.tables["copies"][0]["first"] < ours["first"] / 2
    assert [
        row["k"]
        for row in meaningless.tables["feature_edges"]
        if row["verdict"] in ("depends on", "shown") and row["k"] < 5
    ] == []


def test_an_ablated_feature_changes_the_stream_by_what_it_wrote_there():
    """By hand: the key's stream less what the feature has above its mean, through the head's own
    code.
    """
    scope = planted({Head(0, 1): 0.3}, 0)
    own = true_dictionary(scope)
    one = PromptRun(scope, PROMPT, last=READER.layer, logits=False, layers=[READER.layer]).head(
        READER
    )
    used = one.weights[0].nonzero()[:, 0]
    rows = HeadRows(one.run.slots([0, *(1 + used).tolist()]), one.head, one.signs[:, used])
    split = FeatureSplit(rows, own)
    (terms,) = split.terms()
    feature, right = terms.first(1)[0][1], (rows.signs[0] > 0).nonzero()[0]
    codes = torch.zeros(len(used), len(own.decoder) + 1)
    codes.scatter_(-1, split.coded.ids[0, 1:] % codes.shape[1], split.coded.values[0, 1:])
    others = codes[rows.signs[0] < 0, feature].mean()
    away = (codes[right, feature] - others) * own.decoder[feature]
    lost = rows.run.read(
        READER, "key", [Parts(["away"], away.reshape(1, 1, 1, -1))], [1 + int(right)]
    )[0, 0, 0]
    k = rows.vectors("key").clone()
    k[0, right] -= lost
    ablated = PAIR_CUTS.index(("key", "ablated", 1))
    whole = float(split.edges(split.coded, [terms])[0, ablated])
    assert whole == pytest.approx(float(rows.measure(k=k[None])[0, 0, 0]), abs=1e-6)


def test_a_prompts_edges_are_the_same_beside_others():
    scope, units = planted({Head(0, 1): 0.3}, 0), qk.tasks.induction(6).test(4)
    own, how = (
        true_dictionary(scope),
        Pass(Reader(scope, [READER]), layers=[READER.layer], progress=False),
    )
    every = [
        FeatureSplit(how.rows(units, some)[1][0], own)
        for some in (range(4), *([i] for i in range(4)))
    ]
    together, *alone = (split.edges(split.coded, split.terms()) for split in every)
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-4)


def test_a_dictionary_without_meaning_is_seldom_said_to_have_one():
    scope = planted({Head(0, 1): 0.3}, 0)
    found = [
        qk.trace(
            scope,
            PROMPT,
            READER,
            dictionary=random_dictionary(96, READER.layer, seed),
            draws=10,
            seed=seed,
        )
        for seed in range(6)
    ]
    above = ["more than with any copy without meaning" in one.answer for one in found]
    assert sum(above) <= 2  # one of eleven by chance
    called = {"rotated": "a rotated dictionary", "random": "a random dictionary"}
    for one in (one for one, said in zip(found, above, strict=True) if not said):
        first = one.answer.split(" These pairs say no more than those of ")[1].partition(".")[0]
        copies = one.tables["copies"][1:]
        assert all(
            (called.get(row["kind"], f"other {row['kind']}") in first) is not row["below"]
            for row in copies
        )


def test_a_task_says_the_same_on_words_that_nothing_was_chosen_on():
    writer = Head(0, 1)
    scope = planted({writer: 0.3}, 0)
    own = true_dictionary(scope)
    found = qk.trace(
        scope, qk.tasks.induction(6), READER, 24, dictionary=own, draws=5, progress=False
    )
    assert all(row["below"] for row in found.tables["copies"][1:])
    check = found.tables["check"][0]
    assert check["accuracy"] > 0.9
    assert check["sum_error"] < 1e-5
    for side in ("query", "key"):
        parts = [row["value"] for row in found.tables["features"] if row["side"] == side]
        assert sum(parts) == pytest.approx(check["logit"], abs=1e-5)
    again = qk.trace(
        scope, qk.tasks.induction(6), READER, 24, dictionary=own, draws=5, progress=False
    )
    assert again.tables == found.tables


def test_what_a_model_cannot_be_split_by_is_refused(nano):
    scope = nano
    width = scope.model.config.hidden_size
    wrong = [
        (
            random_dictionary(width + 1, 1),
            {},
            f"has width {width + 1}, and the residual stream of .* has {width}",
        ),
        (
            random_dictionary(width, 3),
            {},
            "stands before layer 3, and L1H0 reads what enters layer 1",
        ),
        (
            random_dictionary(width, 1, splits="mlp"),
            {},
            "splits what M1 wrote, and L1H0 reads what enters layer 1",
        ),
        (random_dictionary(width, 1), {"head": "all"}, "at heads that are named"),
        (
            random_dictionary(width, 1),
            {"what": qk.tasks.induction(), "key": 3},
            "key is for one prompt",
        ),
    ]
    for own, more, said in wrong:
        asked = {"what": PROMPT, "head": "L1H0", **more}
        with pytest.raises(BadInput, match=said):
            qk.trace(scope, asked.pop("what"), asked.pop("head"), dictionary=own, **asked)


def test_the_command_reads_a_saelens_folder_and_writes_a_page(nano, tmp_path, qkscope):
    own, sae, out = (
        random_dictionary(nano.model.config.hidden_size, 1),
        tmp_path / "sae",
        tmp_path / "run",
    )
    sae.mkdir()
    save_file({"W_dec": own.decoder, "W_enc": own.encoder}, sae / "sae_weights.safetensors")
    settings = {
        "architecture": "topk",
        "k": 5,
        "metadata": {"hook_name": "blocks.0.hook_resid_post"},
    }
    (sae / "cfg.json").write_text(json.dumps(settings))
    asked = [
        "trace",
        "induction",
        "--model",
        "nano:mixed",
        "--heads",
        "L1H0,L1H1",
        "-n",
        "8",
        "--draws",
        "2",
    ]
    code, printed, said = qkscope(*asked, "--dictionary", sae, "--out", out)
    assert (code, "feature of the query" in printed) == (0, True), said
    blocks = blocks_of(qk.Result.read(out))
    assert [block.kind for block in blocks] == ["parts", "parts", "curve"]
    for block in blocks[:2]:
        sums = Counter()
        for row in block.rows:
            sums[row["by"], row["side"]] += row["share"]
        assert sums == pytest.approx(
            {("pairs", "both"): 1, ("dictionary", "query"): 1, ("dictionary", "key"): 1}
        )
