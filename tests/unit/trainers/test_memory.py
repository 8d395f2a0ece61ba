"""Parts of a model that are computed again: the same numbers from less memory; and what that memory is."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.platform.collective import Collective, PeerLostError
from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.trainers.batch_norm import synchronize
from orchestray.trainers.memory import ActivationMeter, Chain, find_blocks, recompute
from orchestray.trainers.memory.chain import group, units_of
from orchestray.trainers.pipeline.cutting import layers_of
from orchestray.trainers.pipeline.split_backward import SplitBackward
from orchestray.trainers.randomness import Draw, seed_modules, seed_pass
from orchestray.trainers.tasks.transformer import Block, Embedding
from support.threads import run_replicas

CPU = torch.device("cpu")
DEPTH, WIDTH, SAMPLES = 64, 8, 16


def mlp(depth: int = DEPTH) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3))


def transformer() -> nn.Module:
    return nn.Sequential(Embedding(11, 6, WIDTH, 0.2), *(Block(WIDTH, 2, 0.2) for _ in range(4)), nn.LayerNorm(WIDTH))


def convolutions() -> nn.Module:
    layers: list[nn.Module] = [nn.Unflatten(1, (2, 2, 2))]
    for _ in range(4):
        part = [nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.Dropout(0.3)]
        layers.append(nn.Sequential(*part))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 3))


class Residual(nn.Module):
    """Not a sequence: skips, a tied weight, a parameter of its own, functions between modules, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.layers[3].weight = self.layers[0].weight
        self.layers[1].requires_grad_(False)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for index, layer in enumerate(self.layers):
            x = x + self.scale * functional.gelu(layer(x))
            if index == 2:
                x = self.dropout(self.norm(x))
        return torch.cat([x, first * x.shape[0]], dim=1)


class Drawing(nn.Module):
    """Draws by itself, and counts."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return functional.dropout(self.linear(x) * self.gate(x).sigmoid(), 0.3, self.training) * self.count.clone()


def drawing() -> nn.Module:
    return nn.Sequential(*(Drawing() for _ in range(5)))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.2, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (1, WIDTH)), nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "transformer": transformer,
    "convolutions": convolutions,
    "residual": Residual,
    "drawing": drawing,
    "encoder": encoder,
}
BOTH = pytest.mark.parametrize("how", ["blocks", "sqrt"])


def build(name: str) -> tuple[nn.Module, list[Tensor]]:
    """A model in double precision, and two micro-batches."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    shape = (2, SAMPLES, 6 if name == "transformer" else WIDTH)
    inputs = torch.randint(11, shape) if name == "transformer" else torch.randn(shape, dtype=torch.float64)
    return model, list(inputs)


def train(model: nn.Module, inputs: list[Tensor], draw: Draw, *, in_turn: bool = True) -> list[Tensor]:
    """Losses of two micro-batches, one after the other or as a pipeline's stage does them."""
    losses = []
    for number, x in enumerate(inputs):
        draw.micro_batch = number
        seed_pass(draw, CPU)
        losses.append(model(x).square().mean())
        if in_turn:
            losses[-1].backward()
    if not in_turn:
        for loss in losses:
            loss.backward()
    return [loss.detach() for loss in losses]


def everything(model: nn.Module) -> dict[str, Tensor]:
    """Gradients and buffers."""
    found = {f"grad {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert len(ours) > 2
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@BOTH
@pytest.mark.parametrize("in_turn", [True, False], ids=["in turn", "as in a pipeline"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_buffers_and_random_numbers_are_the_same_bit_for_bit(name: str, in_turn: bool, how: str) -> None:
    plain, inputs = build(name)
    model = copy.deepcopy(plain)
    draw = Draw(seed=3, step=7)
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
    draw = Draw()
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


def train_in_stages(model: nn.Module, inputs: list[Tensor], draw: Draw, how: str, half: bool) -> None:
    """As a pipeline of two stages does, a micro-batch after the other."""
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
    draw = Draw(seed=3)
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
            train(model, [x.split([7, SAMPLES - 7])[collective.rank]], Draw())
            found.append(everything(model))
        return found

    for plain, *others in run_replicas(2, replica):
        for other in others:
            assert_same(other, plain)


# -- memory --------------------------------------------------------------------------------------------------------


def peak_of(model: nn.Module, x: Tensor, how: str) -> int:
    meter = ActivationMeter(model)
    changed = recompute(model, how, meter=meter)
    with meter.watching(x):
        model(x).square().mean().backward()
    changed.undo()
    assert meter.live_bytes == 0
    return meter.peak_bytes


def test_sqrt_keeps_about_two_square_roots_of_the_activations() -> None:
    model = mlp()
    x = torch.randn(SAMPLES, WIDTH)
    none = peak_of(model, x, "none")
    one = SAMPLES * WIDTH * 4
    assert none == DEPTH * one + SAMPLES * 3 * 4, "each ReLU's output, and the model's own for the square"
    # The inputs of all groups but the first, and what one of the groups holds inside.
    assert peak_of(model, x, "sqrt") <= (8 + 9) * one + SAMPLES * 3 * 4
    assert peak_of(model, x, "sqrt") <= 0.35 * none


def test_blocks_keep_their_inputs_and_what_is_inside_one() -> None:
    model = nn.Sequential(*(Block(WIDTH, 2, 0.0) for _ in range(8)))
    x = torch.randn(SAMPLES, 6, WIDTH)
    none, blocks = peak_of(model, x, "none"), peak_of(model, x, "blocks")
    inside = peak_of(model[:1], x, "none") - x.nbytes
    assert none > 7 * inside
    assert blocks <= inside + 8 * x.nbytes + x.nbytes


def test_what_a_segment_holds_goes_with_the_graph() -> None:
    model = mlp(9)
    meter = ActivationMeter(model)
    recompute(model, "sqrt", meter=meter)
    x = torch.randn(SAMPLES, WIDTH)
    with meter.watching(x):
        loss = model(x).sum()
        assert meter.live_bytes > 0
        del loss
        assert meter.live_bytes == 0, "without a backward pass"
        loss = model(x).sum()
        kept = meter.live_bytes
        loss.backward(retain_graph=True)
        assert meter.live_bytes > kept, "what was brought back serves the next backward pass"
        loss.backward()
        assert meter.live_bytes == 0


def test_a_meter_counts_a_storage_once_and_neither_parameters_nor_buffers_nor_the_batch() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Sigmoid(), nn.BatchNorm1d(6))
    x = torch.randn(5, 4)
    meter = ActivationMeter(model)
    with meter.watching(x):
        hidden = model[:2](x)
        assert meter.live_bytes == 5 * 6 * 4, "the sigmoid's output, kept by one module"
        outputs = model[2](hidden)
        statistics = 2 * 6 * 4
        assert meter.live_bytes == 5 * 6 * 4 + statistics, "and by two; and the batch's mean and deviation"
        loss = (outputs[:1] * outputs[1:2]).sum()
        assert meter.live_bytes == 2 * 5 * 6 * 4 + statistics, "parts of a tensor hold all of it"
        loss.backward()
    assert meter.live_bytes == 0
    assert meter.peak_bytes == 2 * 5 * 6 * 4 + statistics
    meter.reset()
    assert meter.peak_bytes == 0
    with meter.watching(x):
        hidden = model[:2](x)
        loss = hidden.sum()
        del hidden, loss
        assert meter.live_bytes == 0, "without a backward pass"


def test_a_meter_watches_the_first_step_and_one_in_so_many() -> None:
    meter = ActivationMeter(nn.Linear(1, 1), every_steps=4)
    watched = []
    for step in range(6, 16):
        with meter.step(step) as is_on:
            watched += [step] if is_on else []
            assert (meter.track(torch.ones(3)) is None) is not is_on
    assert watched == [6, 9, 13]
    with pytest.raises(ValueError, match="every_steps"):
        ActivationMeter(nn.Linear(1, 1), every_steps=0)


def test_a_watched_step_still_notices_what_was_changed_in_place() -> None:
    meter = ActivationMeter(nn.Linear(1, 1))
    with meter.watching():
        x = torch.ones(3, requires_grad=True) * 2
        y = x.square()
        x += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


# -- what can go wrong -----------------------------------------------------------------------------------------------


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


def test_an_input_changed_in_place_is_told_and_an_activation_in_place_works() -> None:
    x = torch.randn(SAMPLES, WIDTH)
    broken = nn.Sequential(*(nn.Sequential(part, nn.Linear(WIDTH, WIDTH)) for part in (nn.Tanh(), InPlace())))
    recompute(broken, "blocks")
    with pytest.raises(TrainingError, match=r"input of module '1' \(Sequential\).*changed in place"):
        broken(x).sum().backward()
    layers: list[nn.Module] = [nn.ELU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.ELU(inplace=True)]
    plain = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))
    model = copy.deepcopy(plain)
    recompute(model, "sqrt", num_live=2)
    gradients = []
    for one in (plain, model):
        start = x.clone().requires_grad_()
        one(start * 1).sum().backward()
        assert start.grad is not None
        gradients.append(start.grad)
    assert torch.equal(*gradients)
    assert_same(everything(model), everything(plain))


class Changing(nn.Module):
    """Does something else every time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.linear(x)
        return x[: -self.calls].exp()


@pytest.mark.parametrize("num_samples", [SAMPLES])
def test_a_module_that_does_something_else_the_second_time_is_told(num_samples: int) -> None:
    model = nn.Sequential(*(nn.Sequential(Changing(), Changing()) for _ in range(2)))
    recompute(model, "blocks")
    with pytest.raises(TrainingError, match="did something else when computed again"):
        model(torch.randn(num_samples, WIDTH)).sum().backward()


def test_gradients_of_gradients_are_refused() -> None:
    model = mlp(9)
    recompute(model, "sqrt")
    with pytest.raises(TrainingError, match="gradients of gradients"):
        torch.autograd.grad(model(torch.randn(SAMPLES, WIDTH)).sum(), list(model.parameters()), create_graph=True)


class Losing(nn.Module):
    """Loses its peer in the second pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 1:
            raise PeerLostError("gone")
        return self.linear(x)


def test_a_lost_peer_surfaces_from_the_second_pass_and_leaves_nothing_behind() -> None:
    norm = nn.BatchNorm1d(WIDTH)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    model = nn.Sequential(nn.Sequential(norm, Losing(), nn.Linear(WIDTH, WIDTH)), plain)
    mean = norm.running_mean
    draw = Draw(step=1)
    recompute(model, "blocks", draw=draw)
    loss = model(torch.randn(SAMPLES, WIDTH)).sum()
    draw.step = 2
    state = torch.get_rng_state()
    with pytest.raises(PeerLostError, match="gone"):
        loss.backward()
    assert norm.running_mean is mean
    assert norm.num_batches_tracked == 1
    assert draw.step == 2
    assert torch.equal(torch.get_rng_state(), state)


class DataDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) if x.sum() > 0 else x


def test_a_model_that_is_no_chain_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"train\.recompute: sqrt needs .*test_memory\.py, line \d+"):
        recompute(DataDependent(), "sqrt")
    with pytest.raises(ConfigError, match="must be one of none, blocks, sqrt, got 'all'"):
        recompute(mlp(), "all")
    assert recompute(DataDependent(), "none").parts == []


# -- what is where -------------------------------------------------------------------------------------------------


def test_blocks_are_the_items_of_sequences_and_lists_that_hold_layers_with_parameters() -> None:
    assert find_blocks(transformer()) == ["1", "2", "3", "4"]
    assert find_blocks(convolutions()) == ["1", "2", "3", "4"]
    assert find_blocks(encoder()) == ["1.layers.0", "1.layers.1", "1.layers.2"]
    assert find_blocks(mlp()) == []


def test_a_unit_begins_with_parameters_and_groups_are_about_the_square_root() -> None:
    assert units_of([False, True, False, True, False, False]) == [(0, 3), (3, 6)]
    assert units_of([False] * 3) == [(0, 1), (1, 2), (2, 3)]
    assert units_of([]) == []
    units = [(2 * index, 2 * index + 2) for index in range(64)]
    assert group(units) == [(16 * index, 16 * index + 16) for index in range(8)]
    assert len(group(units, num_live=4)) == 4
    assert group(units[:1]) == [(0, 2)]
    assert group([]) == []
    assert len(Chain([nn.Linear(1, 1)] * 9).groups) == 3


def test_nothing_slow_is_imported_and_no_ray() -> None:
    code = (
        "import sys, torch\nfrom torch import nn\nfrom orchestray.trainers.memory import ActivationMeter, recompute\n"
        "model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(9)))\nrecompute(model, 'sqrt')\n"
        "with ActivationMeter(model).watching():\n    model(torch.ones(1, 2)).sum().backward()\n"
        "print([name for name in ('torch._dynamo', 'torch._inductor', 'ray', 'sympy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
