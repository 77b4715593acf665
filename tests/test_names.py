"""Names of heads: readings and rules say what they mean, sums are the model's own, and what was planted is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import qkscope as qk
from named_heads import FIRST_WORD, WORDS, Planted, looked_at, made_heads, passages
from qkscope.analyses.discover.changes import change_row
from qkscope.analyses.discover.closer import look_closer
from qkscope.analyses.names.look import Looked, fit_factors
from qkscope.analyses.names.readings import (
    AFTER_COPY,
    BEFORE,
    COPY,
    ITSELF,
    NONE,
    RULES,
    SAME_BEFORE,
    Readings,
    copies,
    followed,
    holds,
    shifted,
)
from qkscope.analyses.names.sentence import UNNAMED, HeadShares, name_row, peak, rule_rates
from qkscope.analyses.names.sight import FIRST, SKIP, Options, Text
from qkscope.analyses.names.study import Study, match_rows
from qkscope.capture.scope import Scope
from qkscope.capture.tap import tap
from qkscope.maths.factors import FactorFit
from qkscope.runs.work import Work
from qkscope.tasks.sides import Passage
from qkscope_papers.families import tiny_model

A, B, C, D = 11, 12, 13, 14
SENTENCE = torch.tensor([[A, B, A, C, C, A, B]])


# ---------------------------------------------------------------- what is read off a text


def test_readings_of_a_text_by_hand() -> None:
    assert shifted(SENTENCE, 2).tolist() == [[NONE, NONE, A, B, A, C, C]]
    # the last copy of A at 5 is at 2, which C followed; C at 4 stands right after its copy; B at 6 was followed by A
    assert followed(SENTENCE).tolist() == [[NONE, NONE, B, NONE, NONE, C, A]]
    assert copies(SENTENCE)[0].nonzero().tolist() == [[2, 0], [4, 3], [5, 0], [5, 2], [6, 1]]


def test_rules_by_hand() -> None:
    table = dict(zip(RULES, holds(SENTENCE)[0].permute(2, 0, 1), strict=True))
    keys = {rule: [row.nonzero().flatten().tolist() for row in table[rule]] for rule in RULES}
    assert keys[ITSELF] == [[i] for i in range(7)]
    assert keys[BEFORE] == [[], [0], [1], [2], [3], [4], [5]]
    assert keys["3 back"][4:] == [[1], [2], [3]]
    assert keys[COPY] == [[], [], [0], [], [3], [0, 2], [1]]
    assert keys[AFTER_COPY] == [[], [], [1], [], [4], [1, 3], [2]]
    assert keys[SAME_BEFORE] == [[], [], [], [1], [], [4], [1, 3]]


def test_no_reading_looks_ahead_or_into_padding() -> None:
    scope = Scope.from_model(tiny_model("llama"))
    (one,) = passages(1, 20, seed=1)
    readings = Readings.of(scope, [one.ids])
    whole = readings.features(torch.tensor([one.ids]))
    cut = readings.features(torch.tensor([one.ids[:12]]))
    padded = readings.features(torch.tensor([(*one.ids[:12], *[0] * 8)]))  # 0 is no token of the passage
    torch.testing.assert_close(whole[:, :12], cut)
    torch.testing.assert_close(padded[:, :12], cut)
    assert sum(readings.widths) == whole.shape[-1]


# ---------------------------------------------------------------- the model's own


FAMILIES = ["llama", "mistral", "gemma2", "gpt_oss", "qwen3", "gpt_neox", "gpt2", "bloom", "mpt"]
"""Plain; with windows; a soft-cap; sinks; QK-norm; part of the dimensions rotated; learned places; ALiBi, twice."""


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_sum_to_the_logit_of_the_models_own_attention(family: str) -> None:
    model = tiny_model(family)
    scope = Scope.from_model(model)
    tested = passages(5, (24, 17, 20), seed=2)
    text, fit, looked = looked_at(scope, passages(40, 24, seed=1), tested, batch_size=3)
    assert ("position" in fit.names) == (family in ("gpt2", "bloom", "mpt"))
    torch.testing.assert_close(looked.blocks.sum((2, 3)), looked.logit, atol=1e-4, rtol=1e-4)
    mass, logit = torch.zeros_like(looked.mass), torch.zeros_like(looked.logit)
    model.set_attn_implementation("eager")
    for passage in tested:
        attentions, raw = own_attention(model, passage.ids)
        kept = torch.ones_like(attentions[0], dtype=torch.bool).tril() & (attentions > 0)  # l h t s
        kept[..., :SKIP], kept[..., :FIRST, :] = False, False
        attention = torch.where(kept, attentions, 0.0)
        given = attention.sum(-1, keepdim=True)
        weights = attention - given * kept / kept.sum(-1, keepdim=True).clamp_min(1)
        # weights sum to 0 along a row, so the log of its attention is as good as its logit; a soft-cap is beyond that
        logits = raw if family == "gemma2" else attentions.clamp_min(1e-30).log()
        row = looked.groups.index(passage.group)
        mass[row] += given.sum((2, 3)).flatten()
        logit[row] += (weights * logits).sum((2, 3)).flatten()
    torch.testing.assert_close(looked.mass, mass, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(looked.logit, logit, atol=1e-3, rtol=1e-4)
    assert turned_back_and_on(text, tested[0].ids) < 1e-5


def own_attention(model: torch.nn.Module, ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Every layer's attention as the model says it, and its logits before any soft-cap; [l, h, t, s]."""
    raw = []

    def visit(call):
        k = call.k.repeat_interleave(call.q.shape[1] // call.k.shape[1], dim=1)
        raw.append(call.scale * (call.q @ k.mT)[0].double())

    with torch.no_grad(), tap(model, visit):
        model(torch.tensor([ids]))
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_attentions=True)
    return torch.stack([x[0].double() for x in out.attentions]), torch.stack(raw)


def turned_back_and_on(text: Text, ids: tuple[int, ...]) -> float:
    """How far queries and keys are from themselves, taken before their rotation and rotated again."""
    errors = []

    def take(call, plan):
        both = zip(text.before_rotation(call, plan), (call.q[:, plan.heads], call.k[:, plan.kv]), strict=True)
        errors.extend(float((text.rotate(call, before) - after).abs().max()) for before, after in both)

    with torch.no_grad():
        text.watch(text.batch([Passage("", 0, ids)], [0], [0]), take)
    return max(errors)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "bloom"])
def test_padding_changes_nothing(family: str) -> None:
    scope = Scope.from_model(tiny_model(family))
    fitted, tested = passages(60, (24, 13, 19), seed=1), passages(6, (24, 13, 19), seed=2)
    _, fit, batched = looked_at(scope, fitted, tested, batch_size=16)
    text, _, alone = looked_at(scope, fitted, tested, batch_size=1)
    single = fit_factors(text, fitted, Work(), Options(batch_size=1, progress=False))
    torch.testing.assert_close(fit.coefficients, single.coefficients, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(fit.y_mean, single.y_mean, atol=1e-5, rtol=1e-4)
    for name, value in batched.tensors().items():
        if name not in ("own", "foreign", "examples"):  # alone, there is no other document to ask with
            torch.testing.assert_close(value, alone.tensors()[name], atol=2e-3, rtol=1e-3, msg=lambda m, n=name: n + m)
    assert float(batched.foreign.abs().sum()) > 0 == float(alone.foreign.abs().sum())


def test_what_a_window_hides_is_not_counted() -> None:
    """A window of four: no key further back has a place in a curve, and rules go by the keys that are in sight."""
    scope = Scope.from_model(tiny_model("mistral"))
    _, _, looked = looked_at(scope, passages(40, 24, seed=1), passages(6, 24, seed=2))
    assert bool((looked.count[:, :4] > 0).all())
    assert bool((looked.count[:, 4:] == 0).all())
    assert max(peak(looked, h) for h in range(len(looked.count))) < 4
    assert rule_rates(looked, 0, "4 back")["coverage"] == 0
    assert rule_rates(looked, 0, "3 back")["coverage"] == 1
    assert rule_rates(looked, 0, "3 back")["chance"] == pytest.approx(0.25)


# ---------------------------------------------------------------- what is planted, and what is not there


RANKS, BACKS = (1, 3, 8), (0, 1)
PARTS = {0: "current", 1: "previous"}


@pytest.fixture(scope="module")
def planted() -> tuple[list[Planted], tuple[Text, FactorFit, Looked]]:
    heads = [Planted(rank, back, seed=rank) for back in BACKS for rank in RANKS]
    return heads, looked_at(made_heads(heads, 1), passages(120, 64, seed=1), passages(24, 64, seed=2))


@pytest.mark.parametrize("back", BACKS)
@pytest.mark.parametrize("rank", RANKS)
def test_a_planted_match_is_named_with_its_span_and_its_tokens(planted, rank: int, back: int) -> None:
    heads, (text, fit, looked) = planted
    h = BACKS.index(back) * len(RANKS) + RANKS.index(rank)
    own = HeadShares.of(looked, fit.names, h)
    row = name_row(looked, own, h)
    assert row["block"] == f"current · {PARTS[back]}"
    assert row["share"] > 0.7
    assert row["low"] > row["sham"]
    assert abs(row["sham"]) < 0.04
    sides = [("current", h), (PARTS[back], len(heads) + h)]
    tokens = torch.arange(FIRST_WORD, WORDS)
    carried = []
    for factor, column in sides:
        where = fit.where(factor)
        values, axes = torch.linalg.eigh(fit.x_covariance[where, where])
        weighted = (axes * values.clamp_min(0).sqrt()) @ axes.T @ fit.coefficients[where, column]
        found = torch.linalg.svd(weighted).Vh[:rank]
        assert float(torch.linalg.svdvals(found @ heads[h].span.T).min()) > 0.95
        features = text.readings.token_features(tokens, factor) - fit.x_mean[where]
        part = features @ fit.coefficients[where, column]
        carried.append(part - part.median(dim=0).values)  # most tokens carry nothing
    scores = torch.linalg.svd(carried[0] @ carried[1].T).U[:, :rank].abs()  # of the logit of each pair of tokens
    tops = [frozenset((FIRST_WORD + scores[:, i].topk(3).indices).tolist()) for i in range(rank)]
    assert set(tops) == {frozenset(own) for own in heads[h].tokens}


def test_a_latent_that_is_no_function_of_the_text_is_matched_and_not_named() -> None:
    """The query asks for the latent of one random key; the latent is Gaussian, and no token says anything of it."""
    generator = torch.Generator().manual_seed(5)

    def latent(ids: Tensor) -> tuple[Tensor, Tensor]:
        k = 2 * torch.randn(*ids.shape, 4, 16, generator=generator)
        places = torch.arange(ids.shape[1])
        asked = (torch.rand(*ids.shape, generator=generator) * (places + 1)).long()  # a key that is in sight
        return k.gather(1, asked[:, :, None, None].expand_as(k)), k

    _, fit, looked = looked_at(made_heads([latent], 4), passages(60, 48, seed=1), passages(24, 48, seed=2))
    rows = [name_row(looked, HeadShares.of(looked, fit.names, h), h) for h in range(4)]
    assert {row["name"] for row in rows} == {UNNAMED}
    assert min(row["rest"] for row in rows) > 0.95
    assert max(row["match_p"] for row in match_rows(looked)) < 0.01


def test_untrained_heads_compare_tokens_in_the_first_layer_and_have_no_name_in_deeper_ones() -> None:
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 8, "hidden_size": WORDS, "head_dim": 16}
    scope = Scope.from_model(tiny_model("llama", vocab_size=WORDS, **sizes))
    _, fit, looked = looked_at(scope, passages(60, 64, seed=1), passages(24, 64, seed=2))
    blocks = [name_row(looked, HeadShares.of(looked, fit.names, h), h)["block"] for h in range(24)]
    assert blocks == ["current · current"] * 8 + [None] * 16


def noise(
    heads: int, seed: int, *, scale: float = 1.0, mean: float = 0.0, shared: float = 0.0, passage: float = 0.0
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Random queries and keys: about a mean query, with a scale that a passage's share, or a part that each has."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    means = mean * normal(heads, 16)

    def make(ids: Tensor) -> tuple[Tensor, Tensor]:
        b, t = ids.shape
        size = scale * (shared * normal(b, 1, heads, 1)).exp()
        q, k = (normal(b, t, heads, 16) + passage * normal(b, 1, heads, 16) for _ in "qk")
        return size * (q + means), size * k

    return make


NOISE = [{}, {"scale": 1.7}, {"mean": 2.0}, {"shared": 0.5}, {"shared": 0.5, "mean": 1.0}, {"passage": 0.7}]
HEADS = 35


@pytest.fixture(scope="module")
def noisy() -> tuple[FactorFit, Looked]:
    make = [noise(HEADS, seed, **kind) for seed, kind in enumerate(NOISE)]
    _, fit, looked = looked_at(made_heads(make, HEADS), passages(40, 48, seed=1), passages(40, 48, seed=2))
    return fit, looked


def test_noise_is_not_named(noisy) -> None:
    fit, looked = noisy
    names = [name_row(looked, HeadShares.of(looked, fit.names, h), h)["name"] for h in range(HEADS * len(NOISE))]
    assert sum(name != UNNAMED for name in names) <= 0.02 * len(names)


def test_noise_is_called_a_match_as_often_as_the_level_says(noisy) -> None:
    _, looked = noisy
    rows = match_rows(looked)
    p = torch.tensor([row["match_p"] for row in rows])
    assert float((p <= 0.05).float().mean()) <= 0.08
    assert 0.35 <= float((p <= 0.5).float().mean()) <= 0.65
    assert sum(row["match_q"] <= 0.05 for row in rows) <= 2
    worst = (p.unflatten(0, (len(NOISE), HEADS)) <= 0.05).sum(1).max()
    assert int(worst) <= 6  # of 35, in no kind of noise more: 6 or fewer in 99.6% at the level


def test_shares_of_the_variance_stand_beside_those_of_the_attended_and_sum_to_one():
    scope = qk.Scope.load("nano:mixed")
    found = qk.discover(scope, qk.tasks.induction(), "L1H1", 160, test=40, sizes=[], changes=0, progress=False)
    lead = found.tables["blocks"][0]
    assert (lead["query"], lead["key"]) == ("current", "previous")
    assert 0 < lead["covariance_share"] < lead["share"]  # few keys are copies, so most of the variance is elsewhere
    assert sum(row["covariance_share"] for row in found.tables["blocks"]) > 0.8


def study_of(scope: Scope, count: int = 48, length: int = 64) -> Study:
    fitted, tested = passages(count, length, 1), passages(16, length, 2)
    text, fit, looked = looked_at(scope, fitted, tested)
    return Study(text, fit, looked, tuple(tested), tuple(fitted), Options())


def test_a_token_changed_in_the_text_changes_the_logit_as_predicted():
    study = study_of(made_heads([Planted(3, 1, noise=0.0)], heads=1))
    row = change_row(study, 0, ("current", "previous"), 160)
    assert row is not None
    assert row["kind"] == "key"
    assert row["low"] < 1 < row["high"] + 0.05
    assert abs(row["block_slope"] - 1) < 0.15
    assert row["correlation"] > 0.9
    assert abs(row["sham_slope"]) < 0.1
    assert abs(row["permuted_correlation"]) < 0.5
    other = change_row(study, 0, ("current", "2 back"), 160)  # which this head does not read
    assert other is not None
    assert abs(other["correlation"]) < 0.3


def test_a_key_behind_a_window_is_neither_changed_nor_swapped():
    scope = Scope.from_model(tiny_model("mistral", vocab_size=WORDS, sliding_window=4), check=False)
    study = study_of(scope)
    assert change_row(study, 0, ("current", "current"), 24) is None
    rows = look_closer(study, 0, None, study.tested, None)
    assert 0 < sum(map(len, rows.q)) < 8 * len(study.tested) / 3


def test_match_is_not_told_where_no_batch_holds_a_second_document():
    fitted, tested = passages(48, 48, 1), passages(6, 48, 2)
    scope = made_heads([Planted(1, 1)], heads=1)
    assert match_rows(looked_at(scope, fitted, tested, batch_size=1)[2])[0]["match_p"] is None
    assert match_rows(looked_at(scope, fitted, tested, batch_size=6)[2])[0]["match_p"] is not None
