"""Computing a part of the time where no layer is split; a split dropout drops what one process would."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.trainers.core.rng import RngKey, seed_modules
from orchestray.trainers.parallel.tensor.apply import split_model
from orchestray.trainers.parallel.tensor.dropout import drop_part
from orchestray.trainers.tasks.transformer import Block, Embedding, initialise
from support.split_models import assert_close, build, check_split
from support.threads import run_replicas

SAMPLES, TIME, WIDTH, HEADS, VOCABULARY = 2, 5, 12, 4, 7
TOKENS = torch.arange(SAMPLES * TIME).remainder(VOCABULARY).view(SAMPLES, TIME)
DOUBLE = 8  # bytes
FEED_FORWARD = {"*.feed_forward_input": "output", "*.feed_forward_output": "input"}


def transformer(dropout: float = 0.0) -> nn.Module:
    model = nn.Sequential(
        Embedding(VOCABULARY, TIME, WIDTH, dropout),
        Block(WIDTH, HEADS, dropout),
        Block(WIDTH, HEADS, dropout),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, VOCABULARY, bias=False),
    )
    initialise(model, 2)
    return model


HEADS_PLAN = {"1": "heads", "2": "heads", **FEED_FORWARD, "4": "output_gathered", "0.tokens": "embedding"}
TIME_PLAN = {"1": "heads+sequence", "2": "sequence + heads", "3": "sequence", **FEED_FORWARD}


@pytest.mark.parametrize(
    ("plan", "size", "dropout"),
    [(HEADS_PLAN, 2, 0.3), (HEADS_PLAN, 3, 0.0), (TIME_PLAN, 2, 0.0), (TIME_PLAN, 3, 0.3), (TIME_PLAN, 4, 0.3)],
    ids=["heads", "heads, 3", "time", "time, dropout", "time, dropout, 4"],
)
def test_a_split_transformer_trains_as_the_plain_one(plan: dict[str, str], size: int, dropout: float) -> None:
    workers = check_split(lambda: transformer(dropout), plan, TOKENS, size)
    split = workers[0][0]
    if plan is TIME_PLAN:
        assert {"1.attention_norm.weight", "2.feed_forward_output.bias", "3.bias"} <= split.partial
        assert not split.partial & set(split.pieces)
    else:
        assert split.partial == set()


@pytest.mark.parametrize("plan", [HEADS_PLAN, TIME_PLAN], ids=["heads", "time"])
def test_a_time_shorter_than_the_workers_passes(plan: dict[str, str]) -> None:
    check_split(transformer, plan, TOKENS[:, :1], 2)


@pytest.mark.parametrize("plan", [HEADS_PLAN, TIME_PLAN], ids=["heads", "time"])
def test_recomputed_blocks_give_the_same_gradients(plan: dict[str, str]) -> None:
    from torch.utils.checkpoint import checkpoint

    plain = build(transformer)
    models = [copy.deepcopy(plain) for _ in range(2)]
    plain(TOKENS).square().sum().backward()

    def run(group: Collective) -> dict[str, Tensor]:
        model = models[group.rank]
        split = split_model(model, plan, lambda: group, group.rank, group.size)
        x = model[0](TOKENS)
        for block in model[1:3]:
            x = checkpoint(block, x, use_reentrant=False)
        model[4](model[3](x)).square().sum().backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        for name in sorted(split.partial):
            group.all_reduce(gradients[name])
        return {name: gradient for name, gradient in gradients.items() if name not in split.pieces}

    for gradients in run_replicas(2, run):
        for name, gradient in gradients.items():
            whole = plain.get_parameter(name).grad
            assert whole is not None
            assert_close(gradient, whole, 1e-12, name)


def test_a_region_alone_computes_the_same() -> None:
    """Check that every worker does its part of the time with whole weights, without split layers inside."""

    def make() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())

    models = [build(make) for _ in range(3)]
    plain = models.pop()
    x = torch.randn(SAMPLES, TIME, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    plain(x).square().sum().backward()

    def run(group: Collective) -> list[Tensor]:
        model = models[group.rank]
        plan = {"0": "sequence", "1": "sequence", "2": "sequence"}
        split = split_model(model, plan, lambda: group, group.rank, group.size, example=x)
        assert split.partial == {name for name, _ in model.named_parameters()}
        model(x).square().sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    for parts, whole in zip(zip(*run_replicas(2, run), strict=True), plain.parameters(), strict=True):
        assert whole.grad is not None
        assert torch.allclose(parts[0] + parts[1], whole.grad, atol=1e-12)


def test_torch_encoder_layers_with_time_first_split_along_the_time() -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, 4, 20, dropout=0.0) for _ in range(2)))

    plan = {"*.self_attn": "heads", "*.linear1": "output", "*.linear2": "input", "0": "sequence", "1": "sequence"}
    inputs = torch.randn(TIME, SAMPLES, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    check_split(make, plan, inputs, 2)


def test_the_time_costs_the_bytes_of_the_all_reduces_it_replaces() -> None:
    """Use a T that divides the time: an all-gather and a reduce-scatter are as many bytes as an all-reduce."""
    models = [build(lambda: nn.Sequential(Block(WIDTH, HEADS, 0.0), Block(WIDTH, HEADS, 0.0))) for _ in range(4)]
    x = torch.randn(SAMPLES, 6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def run(group: Collective, offset: int, style: str) -> tuple[int, int]:
        model = models[group.rank + offset]
        plan = {"0": style, "1": style, **FEED_FORWARD}
        split_model(model, plan, lambda: group, group.rank, group.size)
        y = model(x.clone().requires_grad_())
        forward = group.bytes_sent
        y.sum().backward()
        return forward, group.bytes_sent - forward

    nbytes = x.numel() * DOUBLE
    for forward, backward in run_replicas(2, lambda group: run(group, 0, "heads")):
        assert forward == backward == 4 * nbytes  # an all-reduce of 2 workers sends all of it once
    for forward, backward in run_replicas(2, lambda group: run(group, 2, "heads+sequence")):
        # And a gather at the end, forward; one of the gradient at the beginning, backward.
        assert forward == backward == 4 * nbytes + nbytes // 2


def test_activations_between_split_layers_are_a_part_of_the_time() -> None:
    models = [build(transformer) for _ in range(2)]

    def run(group: Collective) -> list[int]:
        model = models[group.rank]
        split_model(model, TIME_PLAN, lambda: group, group.rank, group.size)
        lengths: list[int] = []
        for name in ("1.attention_norm", "1.feed_forward_norm", "2.attention_norm", "2.feed_forward_norm", "3"):
            norm = model.get_submodule(name)
            norm.register_forward_pre_hook(lambda _m, inputs: lengths.append(inputs[0].shape[1]))
        model(TOKENS)
        return lengths

    assert run_replicas(2, run) == [[3] * 5, [2] * 5]


def dropped() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.ReLU(), nn.Dropout(0.4), nn.Linear(9, 3), nn.Dropout(0.5))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_dropout_between_split_layers_drops_what_one_process_would(size: int) -> None:
    inputs = torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    check_split(dropped, {"0": "output", "2": "dropout", "3": "input"}, inputs, size)


def test_a_torch_encoder_with_dropout_drops_what_one_process_would() -> None:
    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 20, dropout=0.3, batch_first=True)
        layer.self_attn.dropout = 0.0  # drawn within the attention: the next test
        return nn.Sequential(layer)

    plan = {"*.self_attn": "heads", "*.linear1": "output", "*.dropout": "dropout", "*.linear2": "input"}
    inputs = torch.randn(SAMPLES, TIME, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    check_split(make, plan, inputs, 2)


@pytest.mark.parametrize("needs_weights", [False, True])
def test_torch_attention_drops_what_one_process_would(needs_weights: bool) -> None:
    """Run one worker after the other, for torch's generator is one for all threads."""
    plain = build(lambda: nn.MultiheadAttention(WIDTH, HEADS, 0.4, batch_first=True))
    x = torch.randn(SAMPLES, TIME, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    draw = RngKey(seed=3)
    seed_modules(plain, draw, torch.device("cpu"))
    models = [copy.deepcopy(plain) for _ in range(2)]
    wanted, _ = plain(x, x, x, need_weights=needs_weights)
    terms = []
    for rank, model in enumerate(models):
        group = Alone(rank, 2)
        split_model(model, {"": "heads"}, lambda group=group: group, rank, 2)  # type: ignore[arg-type, return-value, misc]
        terms.append(model(x, x, x, need_weights=needs_weights)[0] - model.out_proj.bias)
    assert torch.allclose(sum(terms) + plain.out_proj.bias, wanted, atol=1e-12)


class DrawsItself(nn.Module):
    """Attention that drops by functions, not by a module."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.draws_random = True
        self.num_heads, self.way = HEADS, way
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if self.way == "attention":
            dropped = 0.4 if self.training else 0.0
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropped, is_causal=True)
        else:
            weights = (q @ k.transpose(-2, -1)).softmax(-1)
            mixed = nn.functional.dropout(weights, 0.4, self.training) @ v
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y


@pytest.mark.parametrize("way", ["attention", "function"])
def test_a_block_that_drops_by_itself_drops_what_one_process_would(way: str) -> None:
    plain = build(lambda: DrawsItself(way))
    x = torch.randn(SAMPLES, TIME, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    seed_modules(plain, RngKey(seed=3), torch.device("cpu"))
    models = [copy.deepcopy(plain) for _ in range(3)]
    wanted = plain(x)
    terms = []
    for rank, model in enumerate(models):
        group = Alone(rank, 3)
        split_model(model, {"": "heads"}, lambda group=group: group, rank, 3)  # type: ignore[arg-type, return-value, misc]
        terms.append(model(x) - model.out.bias)
    assert torch.allclose(sum(terms) + plain.out.bias, wanted, atol=1e-12)


def test_a_dropout_that_no_style_names_is_seen_by_an_example() -> None:
    """Check a dropout whose calls get parts at one place and wholes at another."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, 10)
            self.down = nn.Linear(10, WIDTH)
            self.drop = nn.Dropout(0.4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = x + self.drop(self.down(self.drop(self.up(x).relu())))
            return y

    inputs = torch.randn(6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    check_split(Shared, {"up": "output", "down": "input"}, inputs, 3)
    check_split(dropped, {"0": "output", "3": "input"}, inputs, 2)


def test_a_dropout_whose_parts_look_like_wholes_is_refused() -> None:
    class Ambiguous(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(5, 10)
            self.down = nn.Linear(10, 5)
            self.drop = nn.Dropout(0.4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.drop(self.down(self.drop(self.up(x))))
            return y

    models = [build(Ambiguous) for _ in range(2)]

    def run(group: Collective) -> None:
        model, plan = models[group.rank], {"up": "output", "down": "input"}
        with pytest.raises(ConfigError, match="Use a dropout for each place"):
            split_model(model, plan, lambda: group, group.rank, group.size, example=torch.zeros(2, 5).double())

    run_replicas(2, run)


class Alone:
    """A group whose other members add nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, tensor: Tensor) -> None:
        return


@pytest.mark.parametrize("transposed", [False, True])
def test_parts_of_a_mask_are_those_of_the_whole(transposed: bool) -> None:
    from orchestray.trainers.parallel.tensor.base import Cut

    whole = torch.randn(4, 6, 5, dtype=torch.float64)
    whole = whole.transpose(0, 1) if transposed else whole

    def draw(x: Tensor) -> Tensor:
        torch.manual_seed(7)
        return nn.functional.dropout(x, 0.5, training=True)

    cut = Cut(-1, (3, 2))
    parts = [part.clone() for part in whole.split([3, 2], -1)]
    assert torch.equal(
        torch.cat([drop_part(part, cut, rank, draw) for rank, part in enumerate(parts)], -1), draw(whole)
    )


def test_a_dropout_that_gets_something_else_says_so() -> None:
    def run(group: Collective) -> None:
        model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5))
        split_model(model, {"0": "output", "1": "dropout"}, lambda: group, group.rank, group.size)
        with pytest.raises(TrainingError, match=r"The module '1' is split .* called with a tensor of shape \[2, 5\]"):
            model[1](torch.zeros(2, 5))

    run_replicas(2, run)


@pytest.mark.parametrize(
    ("layers", "plan", "sentence"),
    [
        ([nn.Linear(4, 4), nn.Dropout(0.5)], {"1": "dropout"}, "no layer before it leaves its output split"),
        ([nn.Linear(4, 4), nn.AlphaDropout(0.5)], {"0": "output", "1": "dropout"}, "AlphaDropout, which cannot"),
        ([nn.BatchNorm1d(4)], {"0": "sequence"}, "normalises over samples and time"),
        ([nn.RReLU()], {"0": "sequence"}, "draws random numbers, which the style 'sequence' cannot split"),
        ([nn.Sequential(nn.Linear(4, 4))], {"0": "sequence", "0.0": "input_scattered"}, "split along the time"),
        ([nn.Sequential(nn.LayerNorm(4))], {"0": "sequence", "0.0": "sequence"}, "split along the time already"),
    ],
)
def test_what_cannot_be_split_is_refused(layers: list[nn.Module], plan: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        split_model(nn.Sequential(*layers), plan, lambda: None, 0, 2)  # type: ignore[arg-type, return-value]
