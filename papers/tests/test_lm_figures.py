"""Figures of language models: the numbers behind the pictures, and whole runs on tiny models by name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qkscope.analyses.clouds import principal
from qkscope.analyses.find import Ranking
from qkscope.heads import Head
from qkscope.tasks.words import BOXES, CATEGORIES, OBJECTS
from qkscope_papers.families import tiny_model
from qkscope_papers.lee2026.language import choose_heads, for_choice
from qkscope_papers.lee2026.points import align, nearest_centroid, separation
from qkscope_papers.tables import Estimate

_CHAT = "{% for m in messages %}<user>{{ m['content'] }}<end>{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"


def tokenizer(chat: bool) -> PreTrainedTokenizerFast:
    """One token per word and mark, as the tasks write them; the chat template is optional."""
    words = {"<pad>": 0, "<unk>": 1, "<user>": 2, "<end>": 3, "<bot>": 4}
    text = "The is in Box . Which box the ? Question : Answer of these are Find , Items list - male female names"
    plain = text.split()
    named = [*OBJECTS, *BOXES, *(word for own in CATEGORIES.values() for word in own), *CATEGORIES, *plain]
    for word in named:
        words.setdefault(word, len(words))
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", unk_token="<unk>")
    fast.add_special_tokens({"additional_special_tokens": ["<user>", "<end>", "<bot>"]})
    fast.chat_template = _CHAT if chat else None
    return fast


def model_folder(family: str, folder: Path, chat: bool) -> Path:
    tokens = tokenizer(chat)
    model = tiny_model(family, vocab_size=len(tokens), max_position_embeddings=512, head_dim=16)
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)
    return folder


def reproduce(model: Path, out: Path, *figures: str) -> dict[str, dict]:
    command = [sys.executable, "-m", "qkscope", "reproduce", "lee2026", *figures, "--preset", "smoke", "--model",
               str(model), "--out", str(out), "--json"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {result["experiment"].split("/")[1]: result for result in json.loads(done.stdout)["results"]}


SWAP_COLUMNS = {"head", "condition", "rank", "orig_before", "target_before", "orig_after", "target_after", "shift",
                "shift_low", "shift_high", "left", "left_low", "left_high", "flip", "flip_named", "n", "draws",
                "vacuous"}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> tuple[dict[str, dict], Path]:
    folder = tmp_path_factory.mktemp("llama")
    model = model_folder("llama", folder / "model", chat=True)
    figures = ["fig6", "fig7", "fig8", "fig9", "fig10", "fig16", "fig17", "fig18"]
    return reproduce(model, folder / "runs", *figures), folder / "runs"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> tuple[dict[str, dict], Path]:
    folder = tmp_path_factory.mktemp("qwen")
    model = model_folder("qwen3", folder / "model", chat=False)
    return reproduce(model, folder / "runs", "fig19", "fig20"), folder / "runs"


def test_the_papers_templates_reach_a_named_llama(llama):
    results, runs = llama
    manifest = json.loads((runs / "lee2026" / "fig9" / "manifest.json").read_text())
    assert manifest["asked"]["chat"] is True
    assert manifest["asked"]["form"] == "question"
    prompt = results["fig10"]["tables"]["prompt"][0]["text"]
    assert "Which box is the" in prompt
    assert prompt.endswith(" in?\nAnswer: Box")  # the model's own turn follows
    tokens = [row["token"] for row in results["fig10"]["tables"]["tokens"]]
    assert (tokens[0], tokens[-1]) == ("<user>", "<bot>")  # the last token of the template asks


def test_a_tokenizer_without_a_template_gets_bare_prompts(qwen):
    manifest = json.loads((qwen[1] / "lee2026" / "fig20" / "manifest.json").read_text())
    assert manifest["asked"]["chat"] is False
    assert manifest["asked"]["form"] == "question"


def test_every_figure_leaves_a_page_and_a_picture(llama, qwen):
    for results, runs in (llama, qwen):
        for figure in results:
            folder = runs / "lee2026" / figure
            assert (folder / "figures" / f"{figure}.png").read_bytes()[:4] == b"\x89PNG"
            assert (folder / "figures" / f"{figure}.pdf").read_bytes()[:4] == b"%PDF"
            assert "Claims</h2>" in (folder / "report.html").read_text()


def test_binding_swaps_hold_every_condition_beside_its_baselines(llama, qwen):
    for result in (llama[0]["fig9"], llama[0]["fig18"], qwen[0]["fig20"]):
        rows = result["tables"]["swap"]
        assert set(rows[0]) >= SWAP_COLUMNS
        for head in {row["head"] for row in rows}:
            own = {row["condition"]: row for row in rows if row["head"] == head}
            sizes = {name: own[name]["rank"] for name in ("order", "lexical", "both")}
            for name, size in sizes.items():
                assert {own[f"{kind}_{name}"]["rank"] for kind in ("random", "key_pca", "cov_qk")} == {size}
                assert own[f"random_{name}"]["draws"] >= 20
            assert "sham_both" in own
        curve = {(row["method"], row["k"]) for row in result["tables"]["curve"]}
        assert {(m, k) for m in ("order", "lexical", "key_pca", "cov_qk", "random") for k in (1, 2, 4, 8, 12)} <= curve


def test_both_estimators_stand_side_by_side(llama, qwen):
    for result in (llama[0]["fig9"], llama[0]["fig18"], qwen[0]["fig20"]):
        theirs, ours = result["tables"]["paper_swap"], result["tables"]["swap"]
        assert [(row["head"], row["condition"]) for row in theirs] == [(row["head"], row["condition"]) for row in ours]
        assert any(a["shift"] != b["shift"] for a, b in zip(theirs, ours, strict=True))
        center = {row["contrast"]: row["center"] for row in result["tables"]["paper_ranks"]}
        assert center == {"order": "none", "lexical": "none"}
    for figure, table in (("fig8", "views"), ("fig10", "shares"), ("fig16", "counts"), ("fig17", "views")):
        assert {"paper", "ours"} <= {row["estimator"] for row in llama[0][figure]["tables"][table]}


def test_what_the_paper_states_has_its_place_and_what_fails_its_reason(llama, qwen):
    for results in (llama[0], qwen[0]):
        for result in results.values():
            for claim in result["claims"]:
                assert claim["source"] != "stated" or re.match(r"(§|Fig\. )[\dF]", claim["paper"]), claim
                assert (claim["reason"] != "") == (claim["holds"] is False)


def test_every_number_that_a_swap_is_judged_by_is_there(llama, qwen):
    for result in (llama[0]["fig9"], llama[0]["fig18"], qwen[0]["fig20"], llama[0]["fig7"], qwen[0]["fig19"]):
        assert [claim["claim"] for claim in result["claims"] if claim["ours"] is None] == []


def test_filter_swaps_cut_categories_at_one_direction_each(llama, qwen):
    for result in (llama[0]["fig7"], qwen[0]["fig19"]):
        rows = result["tables"]["swap"]
        ranks = {row["condition"]: row["rank"] for row in rows}
        assert ranks["all"] == ranks["random_all"] == ranks["key_pca_all"] == 5
        assert ranks["category"] == 4
        assert len({row["head"] for row in rows}) == 3


def test_ranks_stand_beside_mean_dominance_null_and_a_control_head(llama):
    rows = llama[0]["fig6"]["tables"]["ranks"]
    assert {"rank_99", "rank_null", "rank_99_centred", "interaction_rank", "mean_dominance"} <= set(rows[0])
    assert {row["contrast"] for row in rows} == {"fruits", "animals", "vehicles", "drinks", "countries", "category"}
    assert sum(row["is_control"] for row in rows) == 6


def test_words_and_pairs_are_varied_apart(llama):
    rows = llama[0]["fig16"]["tables"]["counts"]
    assert {row["contrast"] for row in rows if row["varied"] == "words"} == {"lexical"}
    assert {row["contrast"] for row in rows if row["varied"] == "pairs"} == {"order", "lexical"}
    assert len({row["count"] for row in rows if row["varied"] == "words"}) >= 2


def test_logit_parts_sum_and_shares_are_of_one(llama):
    tables = llama[0]["fig10"]["tables"]
    for row in tables["tokens"]:
        assert row["order"] + row["lexical"] + row["residual"] == pytest.approx(row["logit"], abs=1e-4)
    for row in tables["shares"]:
        assert row["order"] + row["lexical"] + row["residual"] == pytest.approx(1, abs=1e-6)


def test_a_random_model_binds_nothing(llama):
    """What needs a head that works must come out false here."""
    found = {claim["claim"]: claim["holds"] for claim in llama[0]["fig9"]["claims"]}
    both = [holds for text, holds in found.items() if text.startswith("swapping both moves the majority")]
    assert both == [False, False]


def ranking(*rows: tuple[str, float, float, float, float]) -> Ranking:
    """Rows of head, accuracy, row accuracy, ratio and mass; chance is 0.2."""
    names = ("head", "accuracy", "row_accuracy", "ratio", "mass")
    more = {"chance": 0.2, "n": 100}
    return Ranking("heads", {"heads": [
        {**dict(zip(names, row, strict=True)), **more, "ratio_low": row[3] - 0.0196, "ratio_high": row[3] + 0.0196}
        for row in rows
    ]})  # fmt: skip


RANKING = ranking(
    ("L0H0", 0.99, 0.99, 0.9, 0.9),  # the first layer cannot know what is asked
    ("L2H0", 0.95, 0.05, 0.8, 0.1),  # right among the boxes, but looks elsewhere
    ("L2H1", 0.60, 0.50, 0.5, 0.6),
    ("L2H2", 0.40, 0.31, 0.4, 0.9),
    ("L2H3", 0.35, 0.29, 0.3, 0.5),
    ("L1H0", 0.00, 0.00, 0.0, 0.5),  # turns away from the right key
    ("L1H1", 0.20, 0.02, 0.2, 0.0),  # at chance, because it looks at no key
    ("L1H2", 0.20, 0.10, 0.21, 0.6),  # at chance, looking
    ("L3H0", 0.20, 0.10, 0.2, 0.6),  # at chance too, but deeper than what was found
)


def test_binding_heads_are_right_among_all_tokens():
    found = choose_heads(RANKING, "binding", 9)
    assert [str(head) for head in found.heads] == ["L2H2", "L2H1"]  # by the attention that the right box gets
    assert found.reached == 2
    capped = choose_heads(RANKING, "binding", 1)
    assert ([str(head) for head in capped.heads], capped.reached) == (["L2H1"], 2)
    row = found.row(Head(2, 1))
    assert row["row_low"] < row["row_accuracy"] < row["row_high"]


def test_without_a_head_that_reaches_the_rule_the_best_stand_in():
    weak = ranking(*((f"L1H{i}", 0.9, 0.01 * i, 0.2, 0.5) for i in range(5)))
    found = choose_heads(weak, "binding", 9)
    assert {str(head) for head in found.heads} == {"L1H4", "L1H3", "L1H2"}
    assert found.reached == 0
    assert found.control not in found.heads


def test_filter_heads_are_chosen_by_their_ratio():
    found = choose_heads(RANKING, "filter", 9)
    assert {str(head) for head in found.heads} == {"L2H0", "L2H1", "L2H2"}


@pytest.mark.parametrize("kind", ["filter", "binding"])
def test_the_control_looks_at_the_keys_and_is_at_chance(kind):
    assert str(choose_heads(RANKING, kind, 9).control) == "L1H2"


def test_the_bound_of_a_chosen_head_pays_for_the_choice():
    found = choose_heads(RANKING, "filter", 9)
    # nine heads: z of 1 - 0.025 / 9 is 2.773, the standard error is 0.01
    assert found.row(Head(2, 1))["ratio_low"] == pytest.approx(0.5 - 2.773 * 0.01, abs=1e-4)
    assert for_choice(Estimate(0.5, 0.5 - 0.0196, 0.5 + 0.0196), 9).high == pytest.approx(0.5277, abs=1e-4)


def test_alignment_is_one_for_equal_sides_and_nothing_for_another_pairing():
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(6, 5, generator=generator).double()
    labels = torch.arange(6).repeat(20)
    points = centres[labels] + 0.01 * torch.randn(120, 5, generator=generator)
    same = align(points + 3, labels, points - 7, labels, seed=0)  # each side is centred: an offset changes nothing
    assert same.cosine == pytest.approx(1, abs=1e-3)
    assert same.hits == 1
    assert same.shuffled == pytest.approx(0, abs=0.1)
    turned = align(points, labels, points, (labels + 1) % 6, seed=0)
    assert turned.cosine < same.shuffled_high
    assert turned.hits == 0


def test_separation_is_the_chance_of_being_above():
    assert separation(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0])) == 1
    assert separation(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])) == 1  # folded: apart is apart
    assert separation(torch.tensor([1.0, 1.0]), torch.tensor([1.0])) == 0.5  # ties count half
    assert separation(torch.tensor([2.0, 0.0]), torch.tensor([1.0])) == 0.5


def test_principal_components_keep_distances_and_pad_what_is_not_there():
    x = torch.randn(9, 2, generator=torch.Generator().manual_seed(1)).double()
    found = principal(x)
    assert found.shape == (9, 3)
    assert torch.allclose(torch.cdist(found, found), torch.cdist(x, x))
    assert not found[:, 2].any()


def test_nearest_centroid_needs_points_it_does_not_know():
    known = torch.tensor([[0.0, 0.0], [0.2, 0.0], [5.0, 5.0]])
    assert nearest_centroid(known, torch.tensor([0, 0, 1]), torch.tensor([[1.0, 0.0], [4.0, 4.0]]),
                            torch.tensor([0, 0])) == 0.5  # fmt: skip
