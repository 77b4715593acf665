"""The depth of a trace: every parent is the sum of its children, and the sources are what the
weights say.
"""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import qkscope as qk
from qkscope.findings.graph import trace_graph
from qkscope.findings.prompt_trace import AskedPrompt, PromptTrace
from qkscope.heads import Head
from qkscope.linear.reader import Reader
from qkscope.model.capture_types import Places
from qkscope.model.encode import Encoding
from qkscope.model.inputs import short_inputs
from qkscope_papers.families import tiny_model

# norms after attention and MLP, a soft-cap; QK-norm; a sink; LayerNorm and parallel blocks
FAMILIES = ["gemma2", "qwen3", "gpt_oss", "cohere"]
# its input scaled; no weights to read: latent attention, a rotation that cannot be read
OWN_CODE = ["falcon_h1", "deepseek_v3", "llama4_text"]


def prompt_of(scope: qk.Scope, length: int = 9) -> Encoding:
    inputs = short_inputs(scope.model, (length,), positions=scope.facts.takes_positions)
    at = Places.everywhere(torch.tensor([0]), torch.tensor([length - 1]), inputs["attention_mask"])
    return Encoding(inputs, at, at.row, {})


def followed(scope, encoded, head, key, others=None, **options):
    asked = AskedPrompt.first_of(scope, encoded)
    run = Reader(scope, [head]).record(asked.inputs, asked.places, deep=True)
    return trace_graph(PromptTrace(run, asked, head, key, others), **options)


def check_sums(graph, tolerance: float = 1e-5) -> int:
    """Each node is the sum of its edges, kind by kind, the rest included; how many were looked at."""
    families: dict = {}
    for edge in graph.edges:
        families.setdefault((edge["target"], edge["kind"], edge["of"]), []).append(edge["value"])
    looked = 0
    for (target, kind, of), values in families.items():
        node = graph.nodes[target]
        if of is None or kind != "value":
            whole = node["value"] if of is None else node["look"]
            assert sum(values) == pytest.approx(whole, abs=tolerance * max(map(abs, values)) + 1e-6)
            looked += 1
    return looked


@pytest.mark.parametrize("family", [*FAMILIES, *OWN_CODE])
def test_children_sum_to_their_parents(family):
    scope = qk.Scope.from_model(tiny_model(family), check=False)
    found = followed(scope, prompt_of(scope), Head(1, 3), 7, width=4)
    # at layer 0 one writer stands beside a logit that may be near 0
    assert found.error < (5e-5 if family in OWN_CODE else 2e-5)
    assert check_sums(found, 1e-4) > 4  # what is shown cancels more than its terms do
    assert {row["kind"] for row in found.edges} == {"value", "query", "key"}
    assert {row["of"] for row in found.edges} > {None}  # and why heads looked there


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_root_is_the_models_own_logit(family):
    scope = qk.Scope.from_model(tiny_model(family), check=False)
    head, encoded = Head(1, 2), prompt_of(scope)
    captured = scope.capture_inputs(encoded, heads=[head])
    logits = captured.rows().logits()[0, 0]
    found = followed(scope, encoded, head, 3, [5, 6], depth=0)
    assert found.nodes[0]["value"] == pytest.approx(
        float(logits[3] - (logits[5] + logits[6]) / 2), rel=1e-4
    )
    assert [row["attention"] for row in found.prompt] == pytest.approx(
        captured.attention()[0, 0].tolist(), abs=1e-6
    )
    assert all(row["target"] == 0 for row in found.edges)


def test_no_attention_of_all_tokens_runs_again_to_ask_what_an_mlp_read(monkeypatch):
    scope, head = qk.Scope.from_model(tiny_model("llama"), check=False), Head(1, 2)
    asked = AskedPrompt.first_of(scope, prompt_of(scope))
    run = Reader(scope, [head]).record(asked.inputs, asked.places, deep=True)
    monkeypatch.delattr(torch.nn.functional, "scaled_dot_product_attention")
    found = trace_graph(PromptTrace(run, asked, head, 3), depth=3, smallest=0)
    assert any(found.nodes[edge["target"]]["writer"] == "M0" for edge in found.edges)
    monkeypatch.setattr(
        "qkscope.findings.graph._AT_ONCE", 4
    )  # of a long prompt the tokens asked about, in parts
    again = trace_graph(PromptTrace(run, asked, head, 3), depth=3, smallest=0)
    # a rest is a difference of large parts, so it is rounded as the largest of them is
    largest = max(abs(edge["value"]) for edge in found.edges)
    assert [edge["value"] for edge in again.edges] == pytest.approx(
        [edge["value"] for edge in found.edges], abs=1e-6 * largest
    )


def test_sources_are_what_the_weights_say():
    """``scale (R_p W_Q σ_p W_O a(p,s) W_V x̂(s)) · (k_t − k_u)``, by hand, of every writer and
    token of the query.
    """
    model = tiny_model("llama").eval()
    torch.nn.init.zeros_(
        model.model.layers[0].mlp.down_proj.weight
    )  # else heads are read through the MLP as well
    scope = qk.Scope.from_model(model, check=False)
    head, encoded = Head(1, 1), prompt_of(scope)
    found = followed(scope, encoded, head, 6, [4], depth=1, width=99, smallest=0)
    first, second = model.model.layers
    width, group = scope.d_head, scope.group_size
    with torch.no_grad():
        x0 = model.model.embed_tokens(encoded.inputs["input_ids"])
        cos, sin = model.model.rotary_emb(x0, encoded.inputs["position_ids"])

        def heads(layer, x):
            attention, z = layer.self_attn, layer.input_layernorm(x)
            q, k, v = (part(z).unflatten(-1, (-1, width)).transpose(1, 2) for part in
                       (attention.q_proj, attention.k_proj, attention.v_proj))  # fmt: skip
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            logits = q @ k.repeat_interleave(group, 1).mT * width**-0.5
            return (
                q,
                k,
                v,
                torch.softmax(logits.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf), -1),
            )

        _, _, v, attention = heads(first, x0)
        x1 = first(x0, position_embeddings=(cos, sin))
        x1 = x1[0] if isinstance(x1, tuple) else x1
        _, k, _, _ = heads(second, x1)
        sigma = x1[0, 8].square().mean().add(second.input_layernorm.variance_epsilon).rsqrt()
        W_Q = second.self_attn.q_proj.weight[width : 2 * width] * second.input_layernorm.weight
        read, seen = {}, 0
        for edge in found.edges:
            if edge["source"] is not None and edge["kind"] == "value" and edge["of"] is None:
                above, below = found.nodes[edge["target"]], found.nodes[edge["source"]]
                if above["side"] == "query" and above["writer"].startswith("L"):
                    read.setdefault((above["writer"], below["position"]), []).append(edge)
        for (name, s), edges in read.items():
            h = Head.parse(name).index
            W_O = first.self_attn.o_proj.weight[:, h * width : (h + 1) * width]
            q = (W_Q @ (sigma * W_O @ (attention[0, h, 8, s] * v[0, h // group, s]))).view(
                1, 1, 1, -1
            )
            q = apply_rotary_pos_emb(q, q, cos[:, 8:9], sin[:, 8:9])[0].flatten()
            difference = k[0, 1 // group, 6] - k[0, 1 // group, 4]
            value = float(q @ difference) * width**-0.5
            assert sum(edge["value"] for edge in edges) == pytest.approx(value, abs=1e-5)
            assert edges[0]["attention"] == pytest.approx(float(attention[0, h, 8, s]), abs=1e-6)
            seen += 1
        assert seen == 4 * 9
