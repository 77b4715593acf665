"""MLP neurons as writers: they sum to their MLP less its bias, are found by looking, and are
refused in words.
"""

import pytest
import torch
from torch import nn

import qkscope as qk
from qkscope.errors import BadInput
from qkscope.heads import Head, parse_writers
from qkscope.linear.attribution import check_neurons, first_neurons, neuron_parts
from qkscope.linear.reader import Reader
from qkscope.model.capture_types import Places
from qkscope.model.inputs import short_inputs
from qkscope.model.scope import Scope
from qkscope_papers.families import tiny_model


def recorded(scope, head, length=9, **options):
    inputs = short_inputs(scope.model, (length,), positions=scope.facts.takes_positions)
    row = torch.zeros(1, dtype=torch.long)
    places = Places.everywhere(row, row + length - 1, inputs["attention_mask"])
    return Reader(scope, [head]).record(inputs, places, deep=True, **options)


def asked(run, head):
    weights = torch.zeros(1, run.columns.shape[1] - 1)
    weights[0, 1:6] = torch.tensor([-0.25, -0.25, -0.25, -0.25, 1.0])
    return run.ask(head, run.columns.shape[1] - 1, torch.arange(1, run.columns.shape[1]), weights)[
        1
    ]


def sum_to_their_mlps(run, head):
    """How far neurons are from their MLP less its bias, over the largest neuron, at the worst; and
    of how many MLPs.
    """
    worst, seen = 0.0, set()
    for direction in asked(run, head).values():
        answer = run.answer(direction)
        for mlp, parts in neuron_parts(run, direction):
            part = run.reader.blocks[mlp.layer].parts[mlp.index[0] if mlp.index else 0]
            bias = getattr(run.reader.last[part][0], "bias", None)
            constant = 0.0 if bias is None else answer.parts[str(mlp)] @ bias.detach()
            missed = parts.sum(-1) - (answer.values[str(mlp)] - constant)
            worst = max(worst, float(missed.abs().max() / parts.abs().max()))
            seen.add(mlp)
    return worst, len(seen)


# plain; a Conv1D with a bias; no module around the MLP; a norm behind it; one to which attention is
# added in place
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma2", "falcon", "jamba"])
def test_neurons_sum_to_their_mlp_less_its_bias(family):
    scope = Scope.from_model(tiny_model(family), check=False)
    for module in scope.model.modules():  # tiny models have biases of 0
        if isinstance(getattr(module, "bias", None), nn.Parameter):
            nn.init.normal_(module.bias, std=0.1)
    head = scope.heads()[-1]
    worst, mlps = sum_to_their_mlps(recorded(scope, head, neurons=True), head)
    assert worst <= 1e-5
    assert mlps == {"jamba": 2}.get(family, head.layer)


def test_a_neuron_that_is_taken_out_takes_its_value_with_it():
    """The sum over neurons could hide a wrong order: one column of the matrix set to 0 changes the
    MLP by that one.
    """
    scope = Scope.from_model(tiny_model("gpt2"), check=False)
    head = scope.heads()[-1]
    run = recorded(scope, head, neurons=True)
    direction = asked(run, head)["key"]
    ((neuron, value, _),) = first_neurons(run, direction, parse_writers("M0.N5"))
    ((_, parts),) = neuron_parts(run, direction)
    matrix = run.reader.last[run.reader.blocks[0].parts[0]][0]
    with torch.no_grad():
        before = matrix(run.neurons[run.reader.blocks[0].parts[0]])
        matrix.weight[5] = 0
        after = matrix(run.neurons[run.reader.blocks[0].parts[0]])
    along = run.answer(direction).parts["M0"]
    assert str(neuron) == "M0.N5"
    assert value == pytest.approx(
        float(((before - after)[:, direction.slots] * along).sum()), rel=1e-4
    )
    assert value == pytest.approx(float(parts[..., 5].sum()), rel=1e-5)


# adds experts up; adds them to a shared one in place; one module of experts
@pytest.mark.parametrize("family", ["mixtral", "llama4_text", "gpt_oss"])
def test_experts_have_no_neurons_to_name(family):
    scope = Scope.from_model(tiny_model(family), check=False)
    with pytest.raises(BadInput, match="has no neurons to name"):
        check_neurons(recorded(scope, Head(1, 0), neurons=True), Head(1, 0), ())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("M1.N0", "M1.N0 does not write before L1H3"),
        ("M0.N99999", "there is no M0.N99999: M0 has 96 neurons, N0 to N95"),
    ],
)
def test_a_neuron_that_is_not_there_is_refused(scope, name, said):
    with pytest.raises(BadInput, match=said):
        qk.trace(scope, "hat is in A", "L1H3", neurons=name)
