"""Parts of a model that are computed again: the same numbers from less memory; and what that memory is."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.trainers.core.batch_norm import synchronize
from orchestray.trainers.core.rng import RngKey, seed_modules, seed_pass
from orchestray.trainers.parallel.pipeline.cutting import layers_of
from orchestray.trainers.parallel.pipeline.split_backward import SplitBackward
from orchestray.trainers.parallel.recompute import find_blocks, recompute
from support.recomputing import (
    BOTH,
    CPU,
    MODELS,
    SAMPLES,
    assert_same,
    build,
    everything,
    train,
)
from support.threads import run_replicas


@BOTH
@pytest.mark.parametrize("in_turn", [True, False], ids=["in turn", "as in a pipeline"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_buffers_and_random_numbers_are_the_same_bit_for_bit(name: str, in_turn: bool, how: str) -> None:
    plain, inputs = build(name)
    model = copy.deepcopy(plain)
    draw = RngKey(seed=3, step=7)
    for one in (plain, model):
        seed_modules(one, draw, CPU)
    names = list(model.state_dict())
    changed = recompute(model, how, draw=draw, num_live=1 if in_turn else 2)
    assert bool(changed.parts) == (how == "sqrt" or name not in {"mlp", "residual"})
    assert list(model.state_dict()) == names
    wanted = train(plain, inputs, draw, in_turn=in_turn)
    state = torch.get_rng_state()
    got = train(model, inputs, draw, in_turn=in_turn)
    assert all(map(torch.equal, got, wanted))
    assert_same(everything(model), everything(plain))
    if in_turn:
        assert torch.equal(torch.get_rng_state(), state), "computing again leaves the generator where it was"
    changed.undo()
    assert "forward" not in vars(model)
    assert all(map(torch.equal, train(model, inputs, draw), train(plain, inputs, draw)))


@BOTH
@pytest.mark.parametrize("name", MODELS)
def test_evaluation_and_passes_without_gradients_are_untouched(name: str, how: str) -> None:
    plain, inputs = build(name)
    model = copy.deepcopy(plain)
    recompute(model, how)
    with torch.no_grad():
        torch.manual_seed(1)
        wanted = plain(inputs[0])
        torch.manual_seed(1)
        assert torch.equal(model(inputs[0]), wanted)
        assert torch.equal(model.eval()(inputs[1]), plain.eval()(inputs[1]))
    model(inputs[0]).square().mean().backward()
    plain(inputs[0]).square().mean().backward()
    assert_same(everything(model), everything(plain))


@BOTH
def test_autocast_is_that_of_the_first_pass(how: str) -> None:
    model, inputs = build("encoder")
    plain = copy.deepcopy(model.float())
    recompute(model, how)
    for one in (model, plain):
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16):
            loss = one(inputs[0].float()).square().mean()
        loss.backward()
    assert_same(everything(model), everything(plain))


def test_blocks_within_groups_are_computed_again_twice_and_stay_the_same() -> None:
    plain, inputs = build("transformer")
    model = copy.deepcopy(plain)
    draw = RngKey()
    for one in (plain, model):
        seed_modules(one, draw, CPU)
    recompute(model, "blocks", draw=draw)
    recompute(model, "sqrt", draw=draw, num_live=2)
    train(plain, inputs, draw)
    train(model, inputs, draw)
    assert_same(everything(model), everything(plain))


def go_back(roots: list[Tensor], gradients: list[Tensor], leaves: list[Tensor], half: bool) -> None:
    if not half:
        torch.autograd.backward(roots, gradients)
        return
    split = SplitBackward([torch.autograd.graph.get_gradient_edge(root) for root in roots], gradients, leaves)
    for leaf, gradient in zip(leaves, split.input_gradients(), strict=True):
        leaf.grad = gradient
    split.accumulate()


def train_in_stages(model: nn.Module, inputs: list[Tensor], draw: RngKey, how: str, half: bool) -> None:
    """Train as a pipeline of two stages does, a micro-batch after the other."""
    blocks = find_blocks(model)
    layers = layers_of(None, model)
    cut = len(layers) // 2
    first, second = layers.stage(0, cut), layers.stage(cut, len(layers))
    for stage in (first, second):
        recompute(stage, how, draw=draw, blocks=blocks, num_live=2)
    for number, x in enumerate(inputs):
        draw.micro_batch = number
        seed_pass(draw, CPU)
        values = first(x)
        leaves = [value.detach().requires_grad_(value.requires_grad) for value in values]
        loss = second(*leaves)[0].square().mean()
        go_back([loss], [torch.ones_like(loss)], [leaf for leaf in leaves if leaf.requires_grad], half)
        pairs = [(value, leaf.grad) for value, leaf in zip(values, leaves, strict=True) if leaf.grad is not None]
        go_back([value for value, _ in pairs], [gradient for _, gradient in pairs], [], half=False)


@pytest.mark.parametrize("half", [False, True], ids=["whole", "in halves"])
@BOTH
@pytest.mark.parametrize("name", MODELS)
def test_stages_of_a_pipeline_are_the_same_bit_for_bit(name: str, how: str, half: bool) -> None:
    plain, inputs = build(name)
    model = copy.deepcopy(plain)
    draw = RngKey(seed=3)
    for one in (plain, model):
        seed_modules(one, draw, CPU)
    for one, way in ((plain, "none"), (model, how)):
        train_in_stages(one, inputs, draw, way, half)
    assert_same(everything(model), everything(plain))


def test_synchronized_batch_normalisation_meets_again_and_stays_the_same() -> None:
    original, (x, _) = build("convolutions")
    for module in original.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # replicas that are threads share torch's generator

    def replica(collective: Collective) -> list[dict[str, Tensor]]:
        found = []
        for how in ("none", "blocks", "sqrt"):
            model = synchronize(copy.deepcopy(original), lambda: collective)
            recompute(model, how)
            train(model, [x.split([7, SAMPLES - 7])[collective.rank]], RngKey())
            found.append(everything(model))
        return found

    for plain, *others in run_replicas(2, replica):
        for other in others:
            assert_same(other, plain)
