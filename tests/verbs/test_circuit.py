"""A circuit from the answer back: sums, nodes replaced in the running model, known nodes first, and
its export.
"""

import json

import pytest
import torch

import qkscope as qk
from planted_model import READER, planted
from qkscope.errors import BadInput
from qkscope.findings.graph import Graph
from qkscope.findings.prompt_trace import PromptRun, reader_of
from qkscope.heads import Head
from qkscope.rerun.nodes import Nodes
from qkscope.rerun.rerun_tokens import prompt_of
from qkscope.verbs.why.circuit import NodeOrder
from qkscope.verbs.why.many_prompts import nodes_of
from qkscope_papers.families import tiny_model
from test_trace_graph import check_sums

PROMPT = "hat: O jam: Z jam:"
FAMILIES = [
    "llama",
    "gemma2",
    "gpt2",
    "gpt_oss",
    "cohere",
]  # norms after parts, biases, experts, parallel blocks


def nodes_of_ids(scope, rows: int = 3, length: int = 8) -> Nodes:
    ids = torch.randint(10, 90, (rows, length), generator=torch.Generator().manual_seed(0))
    pair = torch.tensor([[17, 23]]).expand(rows, -1)
    labels = [[str(i) for i in range(length)]] * rows
    return Nodes(
        reader_of(scope), prompt_of(scope, ids), torch.full((rows,), length - 1), pair, labels
    )


@pytest.fixture(scope="module")
def found(nano):
    return qk.why(nano, PROMPT, circuit=True, versus="O")


@pytest.mark.parametrize("family", FAMILIES)
def test_all_nodes_kept_are_the_model_and_none_a_forward_with_hooks(family):
    scope = qk.Scope.from_model(tiny_model(family), check=False)
    nodes = nodes_of_ids(scope)
    with torch.no_grad():
        logits = scope.model(**nodes.inputs).logits[:, -1].float()
    lead = logits[:, 17] - logits[:, 23]
    everything = torch.ones(3, len(nodes.names), 8, dtype=torch.bool)
    instead = nodes.other_prompts()["mean"]
    (whole,), (none,) = (nodes.kept([mask], instead) for mask in (everything, ~everything))
    assert torch.equal(nodes.lead, whole)
    assert whole == pytest.approx(lead, abs=1e-5)

    def put(site, value):
        shaped = value.reshape(3, 8, *instead[site].shape[2:])
        return torch.cat([shaped[:, :1], instead[site][:, 1:]], dim=1).reshape(value.shape)

    hooks = []
    for i, (module, given, _) in enumerate(nodes.sites):
        if given:
            hooks.append(
                module.register_forward_pre_hook(lambda _m, args, i=i: (put(i, args[0]), *args[1:]))
            )
        else:
            hooks.append(module.register_forward_hook(
                lambda _m, _a, out, i=i: (put(i, out[0]), *out[1:]) if isinstance(out, tuple) else put(i, out)
            ))  # fmt: skip
    with torch.no_grad():
        logits = scope.model(**nodes.inputs).logits[:, -1].float()
    for hook in hooks:
        hook.remove()
    assert none == pytest.approx(logits[:, 17] - logits[:, 23], abs=1e-5)
    assert not torch.allclose(none, whole)


def test_scores_are_gradients_on_the_way_and_means_of_the_same_label_in_other_prompts():
    nodes = nodes_of_ids(qk.Scope.from_model(tiny_model("llama"), check=False))
    instead = nodes.other_prompts()["mean"]
    patching, direct = (nodes.scores(instead, (1.0,), held) for held in (False, True))
    assert not patching[:, :, 0].any()  # the first token is never replaced
    assert not direct[:, :, :-1].any()  # other tokens are read by other nodes alone
    assert direct[:, -1] == pytest.approx(
        patching[:, -1], abs=1e-6
    )  # the last MLP is read by the logits alone
    both = nodes.scores(instead, (0.25, 0.75))
    apart = (nodes.scores(instead, (0.25,)) + nodes.scores(instead, (0.75,))) / 2
    assert both == pytest.approx(apart, abs=1e-5)
    step = 1e-2  # a node moved a little towards what replaces it
    site, writer, token = 1, 2, 5
    nearer = [z.clone() for z in nodes.values]
    nearer[site][:, token, writer - 1] += (
        step * (instead[site] - nearer[site])[:, token, writer - 1]
    )
    mask = torch.ones(3, len(nodes.names), 8, dtype=torch.bool)
    mask[:, writer, token] = False
    moved = (nodes.lead - nodes.kept([mask], nearer)[0]) / step
    assert moved == pytest.approx(patching[:, writer, token], rel=0.1, abs=1e-3)
    made, z = nodes.other_prompts(), nodes.values[3]
    assert made["mean"][3][0, 5] == pytest.approx((z[1, 5] + z[2, 5]) / 2, abs=1e-6)
    other = made["other"][3][0]
    assert any(torch.allclose(other[1:], z[row, 1:], atol=1e-6) for row in (1, 2))
    nodes.labels = [[f"{row} {label}" for label in own] for row, own in enumerate(nodes.labels)]
    everywhere = torch.cat([z[1, 1:], z[2, 1:]]).mean(0)  # no other prompt has the label
    assert nodes.other_prompts()["mean"][3][0, 5] == pytest.approx(everywhere, abs=1e-5)


def test_a_planted_circuit_has_its_nodes_first():
    """Two hops: the writer copies the token before into the key, and the reader's value is made to
    say that token.
    """
    writer = Head(0, 1)
    scope = planted({writer: 0.6}, 1)
    model = scope.model
    with torch.no_grad():
        token, _, _ = model.planted
        size = token.shape[1] // 3
        start = 2 * token.shape[1] + READER.index * size
        basis = torch.linalg.qr(token.T)[0][:, :size]
        model.transformer.h[READER.layer].attn.c_attn.weight[:, start : start + size] += basis
        model.transformer.h[READER.layer].attn.c_proj.weight[
            READER.index * size : (READER.index + 1) * size
        ] += 4 * basis.T
        model.lm_head.weight += 8 * token
    examples = []
    for unit in qk.tasks.induction(6, seed=1).test(16):
        right = next(key for key in unit[0].keys if key.label("answer") > 0)
        wrong = next(key for key in unit[0].keys if key.label("answer") < 0)
        told = [unit[0].piece(key.span) for key in (right, wrong)]
        examples.append(
            qk.Example(unit[0].text, answers=qk.examples.Answers((told[0],), (told[1],)))
        )
    nodes = nodes_of(scope, examples)
    assert float((nodes.lead > 0).float().mean()) > 0.9
    ranking = NodeOrder(nodes, nodes.other_prompts())
    first = [name for name, _ in ranking.first("circuit", 4)]
    assert first[0] == str(READER)
    assert {*first} == {"embedding", str(writer), str(READER)}


def test_the_graph_of_an_answer_sums_and_leads_to_words(found, nano):
    check = found.tables["check"][0]
    assert check["sum_error"] < 2e-5
    probe = PromptRun(nano, PROMPT)
    logits = probe.run.logits[0].detach()
    graph = Graph(found.tables["nodes"], found.tables["graph"], [], 0.0)
    assert check_sums(graph, 1e-4) > 10
    best, rival = (nano.tokenizer.convert_tokens_to_ids(word) for word in ("Z", "O"))
    assert graph.nodes[0]["value"] == pytest.approx(float(logits[best] - logits[rival]), rel=1e-5)
    assert {"embedding"} < {row["writer"] for row in graph.nodes}
    assert len({(row["writer"], row["position"]) for row in graph.nodes}) == len(graph.nodes)
    kept = {
        (row["by"], row["done"], row["k"]): row["share"]
        for row in found.tables["kept"]
        if row["replaced"] == "mean"
    }
    assert kept["circuit", "kept", max(k for *_, k in kept)] == pytest.approx(1.0, abs=1e-5)
    assert found.to_networkx().number_of_nodes() == len(graph.nodes)


def test_a_graph_is_exported_as_circuit_tracer_reads_it(nano, tmp_path):
    file = tmp_path / "graph.json"
    found = qk.why(nano, PROMPT, circuit=True, export=file)
    made = json.loads(file.read_text())
    assert {name: type(value) for name, value in made["metadata"].items()} == {
        "slug": str, "scan": str, "transcoder_list": list, "prompt_tokens": list, "prompt": str,
        "node_threshold": type(None), "schema_version": int,
    }  # fmt: skip
    assert set(made["qParams"]) == {"pinnedIds", "supernodes", "linkType", "clickedId", "sg_pos"}
    fields = {
        "node_id": str, "feature": int, "layer": str, "ctx_idx": int, "feature_type": str, "token_prob": float,
        "is_target_logit": bool, "run_idx": int, "reverse_ctx_idx": int, "jsNodeId": str, "clerp": str,
    }  # fmt: skip
    for node in made["nodes"]:
        assert {name: type(node[name]) for name in fields} == fields
    ids = [node["node_id"] for node in made["nodes"]]
    assert len(set(ids)) == len(ids) == len(found.tables["nodes"])
    assert all({link["source"], link["target"]} <= {*ids} for link in made["links"])
    into = sum(link["weight"] for link in made["links"] if link["target"] == ids[0])
    root = found.tables["nodes"][0]
    assert into + root["rest"] == pytest.approx(root["value"], abs=1e-4)


def test_what_cannot_be_a_circuit_is_refused_in_a_sentence(nano, tmp_path):
    for match, options in (
        ("is a folder: name a file", {"circuit": True, "export": tmp_path}), ("takes a circuit", {"export": "x.json"}),
        ("starts at the answer", {"circuit": True, "head": "L2H3"}),
        ("is the next token itself", {"circuit": True, "versus": "Z"}),
    ):  # fmt: skip
        with pytest.raises(BadInput, match=match):
            qk.why(nano, PROMPT, **options)
    with pytest.raises(BadInput, match="a circuit leads to several"):
        qk.why(nano, "hat", circuit=True)
    with pytest.raises(BadInput, match="at least four"):
        qk.why(nano, [PROMPT, PROMPT], circuit=True)


def test_nodes_of_many_prompts_are_chosen_on_half_and_tested_on_the_others(nano):
    examples = [unit[0] for unit in qk.tasks.induction().test(12)]
    found = qk.why(nano, examples, circuit=True)
    rows = found.tables["kept"]
    assert {row["prompts"] for row in rows} == {6}
    own = next(row for row in rows if (row["by"], row["done"], row["k"]) == ("circuit", "kept", 20))
    assert own["low"] <= own["share"] <= own["high"]
    assert "chosen on 6 others" in found.answer
