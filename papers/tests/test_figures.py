"""Figures end to end, as small as they go: their folders, claims, controls, and the numbers behind
the pictures.
"""

import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qkscope import BadInput, Result
from qkscope.texts.word_pools import BOXES, CATEGORIES, OBJECTS
from qkscope_papers.families import tiny_model
from qkscope_papers.franco2026 import model_sweep
from qkscope_papers.franco2026.cells import WORK, ToyWork
from qkscope_papers.franco2026.model_sparsity import relabelled
from qkscope_papers.franco2026.model_sweep import SweepWork
from qkscope_papers.registry import NANO, Settings, figure_of, reproduce

TINY = ToyWork(60, 60, 20, 60, 20, 5e-3, 20, 60, 5, 2, 2, 2, 24, 3, 3)
TOYS = ["fig2", "fig3", "fig6", "fig7a", "fig23", "feature_pairs"]  # one of each file; all: .ci/run
SWEPT = ["fig7b", "fig8", "fig9b", "fig25"]
_CHAT = "{% for m in messages %}<user>{{ m['content'] }}<end>{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
_MARKS = "The is in Box . Which box the ? Question : Answer of these are Find , Items list - male female names"


def model_folder(folder: Path) -> str:
    """A tiny model whose tokenizer has one token per word and mark, as the tasks write them."""
    special = ["<pad>", "<unk>", "<user>", "<end>", "<bot>"]
    named = [
        *OBJECTS,
        *BOXES,
        *(word for own in CATEGORIES.values() for word in own),
        *CATEGORIES,
        *_MARKS.split(),
    ]
    words = {word: i for i, word in enumerate(dict.fromkeys([*special, *named]))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")
    fast.add_special_tokens({"additional_special_tokens": special[2:]})
    fast.chat_template = _CHAT
    tiny_model(
        "llama", vocab_size=len(words), max_position_embeddings=512, head_dim=16
    ).save_pretrained(folder)
    fast.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("figures")


@pytest.fixture(scope="module")
def heads(out):
    return reproduce("lee2026", ["fig2", "fig3", "fig4"], preset="smoke", out=out / "heads")


@pytest.fixture(scope="module")
def llama(out):
    model = model_folder(out / "llama-model")
    return reproduce(
        "lee2026", ["fig7", "fig9", "fig10"], preset="smoke", out=out / "llama", model=model
    )


@pytest.fixture(scope="module")
def toys(out):
    """A figure of each kind on a few steps of training: what is computed, not what is found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(WORK, "smoke", TINY)
        yield reproduce("franco2026", TOYS, preset="smoke", out=out / "toys")


@pytest.fixture(scope="module")
def swept(out):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(out / "cache"))
        patch.setitem(model_sweep.WORK, "smoke", SweepWork(6, 1, 3, 100))
        model_sweep._swept.cache_clear()
        yield reproduce("franco2026", SWEPT, preset="smoke", out=out / "swept")


@pytest.mark.parametrize("run", ["heads", "llama", "toys", "swept"])
def test_every_figure_leaves_a_page_a_picture_and_claims_with_their_place_and_control(
    run, out, request
):
    results: dict[str, Result] = request.getfixturevalue(run)
    for figure, result in results.items():
        folder = out / run / Path(result.experiment)
        stored = json.loads((folder / "results.json").read_text())
        assert (stored["schema"], stored["experiment"], stored["preset"]) == (
            1,
            result.experiment,
            "smoke",
        )
        if figure != "feature_pairs":  # its page says it all
            assert (folder / "figures" / f"{figure}.png").read_bytes().startswith(b"\x89PNG")
            assert (folder / "figures" / f"{figure}.pdf").read_bytes().startswith(b"%PDF")
        page = (folder / "report.html").read_text()
        assert "Claims</h2>" in page
        assert 'src="http' not in page, "the page works offline"
        assert result.claims
        for claim in stored["claims"]:
            place = (
                r"(§|Fig\. )[\dF]"
                if run in ("heads", "llama")
                else r"Sec\.|App\.|[A-G]\.\d|Theorem|Corol"
            )
            assert claim["source"] != "stated" or re.match(place, claim["paper"]), claim
            assert (claim["reason"] != "") == (claim["holds"] is False), claim
            assert run != "toys" or claim["control"] is not None or claim["ours"] is None, claim
    said = [
        claim.claim
        for result in results.values()
        for claim in result.claims
        if not claim.claim.startswith("...")
    ]
    assert run != "toys" or len(set(said)) == len(said), (
        "no claim of a figure stands with another one"
    )


def test_smoke_already_shows_exact_ranks_swaps_and_a_cube(heads, out):
    rows = heads["fig2"].tables["ranks"]
    assert {"null1", "null2", "untrained1", "untrained2"} <= set(rows[0])
    below = [row for row in rows if row["r1"] + row["r2"] < row["d_head"]]
    assert len(below) >= 3
    for row in below:
        assert (row["rank1"], row["rank2"]) == (row["r1"], row["r2"])
        assert 0.8 < row["accuracy"] < row["ceiling"] + 0.02
    found = {row["condition"]: row for row in heads["fig4"].tables["swap"]}
    assert found["both"]["orig_after"] <= 0.01
    assert found["random_both"]["orig_after"] > 0.1
    assert {"z1_oracle", "z1_oblique", "key_pca_both", "cov_qk_both", "untrained_both"} <= set(
        found
    )
    page = (out / "heads" / "lee2026" / "fig3" / "report.html").read_text()
    assert '<img alt="fig3"' in page
    rows = {row["head"]: row for row in heads["fig3"].tables["geometry"]}
    assert rows["trained"]["vertices"] == 8
    assert rows["trained"]["cosine"] > rows["untrained"]["cosine"] + 0.2
    assert len(list((out / "heads" / "heads").iterdir())) == 5, (
        "four cells of fig2, one head for both fig3 and fig4"
    )


def test_templates_reach_a_model_and_binding_swaps_stand_beside_their_baselines(llama, out):
    asked = json.loads((out / "llama" / "lee2026" / "fig9" / "manifest.json").read_text())["asked"]
    assert (asked["chat"], asked["form"]) == (True, "question")
    prompt = llama["fig10"].tables["prompt"][0]["text"]
    assert "Which box is the" in prompt
    assert prompt.endswith(" in?\nAnswer: Box")  # the model's own turn follows
    tokens = [row["token"] for row in llama["fig10"].tables["tokens"]]
    assert (tokens[0], tokens[-1]) == ("<user>", "<bot>")  # the last token of the template asks
    rows, theirs = (llama["fig9"].tables[table] for table in ("swap", "paper_swap"))
    assert [(row["head"], row["condition"]) for row in theirs] == [
        (row["head"], row["condition"]) for row in rows
    ]
    assert any(a["shift"] != b["shift"] for a, b in zip(theirs, rows, strict=True))
    centers = {row["contrast"]: row["center"] for row in llama["fig9"].tables["paper_ranks"]}
    assert centers == {"order": "none", "lexical": "none"}
    assert {"paper", "ours"} <= {row["estimator"] for row in llama["fig10"].tables["shares"]}
    for result in (llama["fig9"], llama["fig7"]):
        assert [claim.claim for claim in result.claims if claim.ours is None] == []
    both = [
        claim
        for claim in llama["fig9"].claims
        if claim.claim.startswith("swapping both moves the majority")
    ]
    assert [claim.holds for claim in both] == [False, False]


def test_figures_share_their_toys_their_columns_are_defined_and_figure_23_has_controls(toys, out):
    settings = Settings("smoke", out / "toys")
    asked = [figure_of("franco2026", figure).asked for figure in toys]  # theorems have no toys
    used = {
        cell
        for own in asked
        if "cells" in own
        for cells in own["cells"](settings).values()
        for cell in cells
    }
    assert len(list((out / "toys" / "superposition").iterdir())) == len(used)
    rows, (on_last, _, fitting, *_) = toys["fig23"].tables["alignment"], toys["fig23"].claims
    crowded = {
        row["config"] for row in rows if row["surplus"]
    }  # toys with as many pairs as dimensions have no surplus
    untrained = [row for row in rows if row["control"] and row["config"] in crowded]
    own = [row["on_own"] for row in untrained if not row["surplus"]]
    last = [row["on_last"] for row in untrained if row["surplus"]]
    assert fitting.control == pytest.approx(sum(own) / len(own))
    assert on_last.control == pytest.approx(sum(last) / len(last))
    page = (Path(__file__).parents[1] / "docs" / "columns.txt").read_text()
    named = set(re.findall(r"`([a-z_0-9]+)`", page)) | {f"band_{i}" for i in range(5)}
    ends = re.compile(r"_(sd|untrained|low|high)$")
    for result in toys.values():
        for table, rows in result.tables.items():
            missing = {ends.sub("", column) for row in rows for column in row} - named
            assert table in named, table
            assert not missing, f"{result.experiment}, {table}: {missing}"


def test_figures_of_training_run_on_a_nano_by_default(swept):
    assert {result.model for result in swept.values()} == {NANO}
    training = swept["fig7b"].tables["training"]
    assert [row["step"] for row in training][::2] == [0, max(row["step"] for row in training)]
    assert all(row["low"] <= row["difference"] <= row["high"] for row in training)
    claims = {claim.claim: claim for claim in swept["fig7b"].claims}
    assert claims[
        "Sparsity falls over training (change of its mean over the circuit; control: at heads outside)"
    ]
    assert {claim.reason for claim in claims.values()} == {"needs default"}, "smoke decides nothing"
    units = swept["fig7b"].tables["heads"]
    for when in ("over training", "at the end"):
        inside, outside = (
            [u["value"] for u in units if (u["when"], u["circuit"]) == (when, c)]
            for c in (True, False)
        )
        assert len({u["head"] for u in units}) == len(inside) + len(outside), (
            "a head is one unit, whatever its edges"
        )
        (claim,) = (
            claim
            for name, claim in claims.items()
            if name.startswith(f"More so than at other heads, {when}")
        )
        assert claim.ours == pytest.approx(relabelled(inside, outside))
        assert claim.holds == (claim.ours < 0.05)
    assert len(swept["fig8"].tables["heads"]) == 4
    assert len(swept["fig25"].tables["heads"]) == sum(
        row["circuit"] for row in swept["fig9b"].tables["sparsity"]
    )
    counts = {row["what"] for row in swept["fig9b"].tables["counts"]}
    assert counts == {"count", "count_tol", "count_null", "count_tol_null"}


def test_one_sweep_serves_all_and_the_papers_one_prompt_can_be_asked_for(swept, out, tmp_path):
    (folder,) = (out / "swept" / "franco2026" / "model_sweeps").iterdir()
    stamps = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    model_sweep._swept.cache_clear()
    reproduce("franco2026", ["fig9b"], preset="smoke", out=out / "swept", again=True)
    assert stamps == {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    results = reproduce(
        "franco2026", ["fig8", "fig9b"], preset="smoke", out=tmp_path, prompts="single"
    )
    for table in ("sparsity", "counts"):
        assert {row["n"] for row in results["fig9b"].tables[table]} == {1}
    assert (
        json.loads((tmp_path / "franco2026" / "fig8" / "manifest.json").read_text())["figure"][
            "prompts"
        ]
        == "single"
    )
    for figures, prompts in ((["fig9a"], "stories"), (["fig8"], "stories")):
        with pytest.raises(BadInput, match=f"no prompts '{prompts}'"):
            reproduce("franco2026", figures, preset="smoke", out=tmp_path, prompts=prompts)


def test_a_model_with_one_checkpoint_has_no_training_to_show(swept, nano, tmp_path):
    tiny_model("gpt_neox", vocab_size=len(nano.tokenizer)).save_pretrained(tmp_path / "model")
    nano.tokenizer.save_pretrained(tmp_path / "model")
    asked = {"preset": "smoke", "out": tmp_path / "out", "model": str(tmp_path / "model")}
    found = reproduce("franco2026", ["fig7b"], **asked)["fig7b"]
    assert "training" not in found.tables
    assert not any("over training" in claim.claim for claim in found.claims)
