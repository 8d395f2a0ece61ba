"""Attention split by heads: torch's own module, the built-in block, and blocks as users write them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.platform.comm.collective import Collective
from orchestray.platform.errors import ConfigError
from orchestray.trainers.parallel.tensor.apply import split_model
from orchestray.trainers.parallel.tensor.attention_blocks import find_attention
from orchestray.trainers.tasks.transformer import Block
from support.split_models import assert_close, build, check_split
from support.threads import run_replicas

SAMPLES, TIME, WIDTH = 3, 5, 12


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Packed(nn.Module):
    """An attention with one layer for queries, keys and values, as many users have it."""

    def __init__(self, width: int = WIDTH, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_width = width // num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.drop = nn.Dropout(0.0)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_width)).permute(2, 0, 3, 1, 4)
        weights = self.drop((q @ k.transpose(-2, -1) / self.head_width**0.5).softmax(-1))
        y: Tensor = x + self.proj((weights @ v).transpose(1, 2).flatten(2))
        return y


class Separate(nn.Module):
    """Three layers; keys and values may have fewer heads (Ainslie et al., "GQA", 2023)."""

    def __init__(self, heads: int = 4, kv_heads: int = 4, is_crossed: bool = False) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = heads, kv_heads
        self.head_dim = WIDTH // heads
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj = nn.Linear(WIDTH, kv_heads * self.head_dim)
        self.v_proj = nn.Linear(WIDTH, kv_heads * self.head_dim)
        self.o_proj = nn.Linear(WIDTH, WIDTH)
        self.is_crossed = is_crossed

    def forward(self, x: Tensor) -> Tensor:
        memory = x.flip(1) if self.is_crossed else x
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        k = self.k_proj(memory).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        v = self.v_proj(memory).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        each = self.n_heads // self.n_kv_heads
        k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        y: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return y


class OfTorch(nn.Module):
    """`nn.MultiheadAttention` behind one input."""

    def __init__(self, options: dict[str, Any], called: dict[str, Any] | None = None, what: str = "self") -> None:
        super().__init__()
        self.entrance = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, **options)
        self.called = called or {}
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        x = self.entrance(x)
        memory = {"self": x, "memory": x.flip(0).flip(1), "dims": x[..., :6]}[self.what]
        output, weights = self.attention(x, memory, memory, **self.called)
        return output if weights is None else torch.cat([output.flatten(), weights.flatten()])


PLAIN = {"need_weights": False}
HIDDEN = torch.tensor([[False] * 4 + [True], [False] * 5, [False, True, False, True, False]])
CAUSAL = torch.full((TIME, TIME), float("-inf")).triu(1)
PER_HEAD = numbers(SAMPLES * 4, TIME, TIME, seed=3)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("make", [Packed, Separate, lambda: Block(WIDTH, 4, 0.0)], ids=["packed", "separate", "block"])
def test_blocks_split_by_heads_train_as_the_plain_ones(make: Any, size: int) -> None:
    check_split(make, {"": "heads"}, numbers(SAMPLES, TIME, WIDTH), size)


@pytest.mark.parametrize(
    ("options", "called", "what"),
    [
        ({"batch_first": True}, PLAIN, "self"),
        ({"batch_first": True, "bias": False}, {}, "self"),
        ({"batch_first": True}, {"average_attn_weights": False}, "memory"),
        ({"batch_first": True}, {**PLAIN, "key_padding_mask": HIDDEN}, "self"),
        ({"batch_first": True}, {"key_padding_mask": HIDDEN, "attn_mask": CAUSAL.bool()}, "memory"),
        ({"batch_first": True}, {**PLAIN, "attn_mask": CAUSAL, "is_causal": True}, "self"),
        ({"batch_first": True}, {**PLAIN, "attn_mask": PER_HEAD}, "self"),
        ({"batch_first": True, "kdim": 6, "vdim": 6}, PLAIN, "dims"),
    ],
    ids=["plain", "weights", "every head's weights", "padding", "two masks", "causal", "mask a head", "other widths"],
)
def test_torch_attention_split_by_heads_is_itself(options: dict[str, Any], called: dict[str, Any], what: str) -> None:
    check_split(lambda: OfTorch(options, called, what), {"attention": "heads"}, numbers(SAMPLES, TIME, WIDTH), 3)


def test_torch_attention_with_time_first_and_without_samples() -> None:
    check_split(lambda: OfTorch({}, PLAIN), {"attention": "heads"}, numbers(TIME, SAMPLES, WIDTH), 2)
    check_split(lambda: OfTorch({}, {}), {"attention": "heads"}, numbers(TIME, WIDTH), 2)


def test_a_torch_encoder_is_split_in_training_and_in_evaluation() -> None:
    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 20, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 2)

    plan = {"layers.*.self_attn": "heads", "layers.*.linear1": "output", "layers.*.linear2": "input"}
    inputs = numbers(SAMPLES, TIME, WIDTH)
    workers = check_split(make, plan, inputs, 2)
    assert len(workers[0][0].pieces) == 2 * 6

    # Without the attention, torch's short cut of evaluation would read the two layers' weights past their forward.
    del plan["layers.*.self_attn"]
    check_split(make, plan, inputs, 2)


def test_heads_that_share_keys_and_values_stay_together() -> None:
    workers = check_split(lambda: Separate(6, 3), {"": "heads"}, numbers(SAMPLES, TIME, WIDTH), 2)
    assert [split.pieces["q_proj.weight"].ranges[0] for split, _ in workers] == [((0, 8),), ((8, 12),)]
    assert [split.pieces["k_proj.weight"].ranges[0] for split, _ in workers] == [((0, 4),), ((4, 6),)]


def test_queries_and_memory_enter_apart() -> None:
    check_split(lambda: Separate(is_crossed=True), {"": "heads"}, numbers(SAMPLES, TIME, WIDTH), 2)


def test_three_projections_of_one_input_add_its_gradient_up_once() -> None:
    model = build(Separate)
    models = [copy.deepcopy(model) for _ in range(2)]

    def run(group: Collective) -> int:
        split_model(models[group.rank], {"": "heads"}, lambda: group, group.rank, group.size)
        y = models[group.rank](numbers(SAMPLES, TIME, WIDTH).requires_grad_())
        before = group.bytes_sent
        y.sum().backward()
        return group.bytes_sent - before

    assert run_replicas(2, run) == [SAMPLES * TIME * WIDTH * 8] * 2


def test_packed_projections_are_cut_head_by_head() -> None:
    workers = check_split(Packed, {"": "heads"}, numbers(SAMPLES, TIME, WIDTH), 3)
    ranges = [split.pieces["qkv.weight"].ranges[0] for split, _ in workers]
    assert ranges == [
        ((0, 6), (12, 18), (24, 30)),
        ((6, 9), (18, 21), (30, 33)),
        ((9, 12), (21, 24), (33, 36)),
    ]


def test_the_parts_of_a_block_are_recognised() -> None:
    found = find_attention(Block(WIDTH, 4, 0.0))
    assert found is not None
    assert found.layers == ("query_key_value", "attention_output")
    assert find_attention(nn.TransformerEncoderLayer(WIDTH, 4)) is None
    assert find_attention(nn.Sequential(nn.Linear(3, 9))) is None


class FromItsInput(Packed):
    """An attention that reads the width of the whole where the layers give a part."""

    def forward(self, x: Tensor) -> Tensor:
        samples, time, width = x.shape
        q, k, v = self.qkv(x).view(samples, time, 3, self.num_heads, width // self.num_heads).permute(2, 0, 3, 1, 4)
        y: Tensor = self.proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return y


class HeadsFirst(Packed):
    """An attention that packs query, key and value of each head, where the split expects all queries first."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (self.num_heads, 3, self.head_width)).permute(3, 0, 2, 1, 4)
        y: Tensor = self.proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return y


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (FromItsInput, r"the model fails in the module 'block' \(FromItsInput\).*unflatten\(-1, \(3, self.heads"),
        (HeadsFirst, r"first output that differs, by up to .* 'block.proj' \(Linear\), part of 'block' \('heads'\)"),
    ],
)
def test_a_block_that_breaks_by_heads_is_refused_and_left_whole(kind: type[Packed], sentence: str) -> None:
    plain = build(lambda: nn.ModuleDict({"block": kind()}))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = plain["block"]

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.block(x)
            return y

    models = [copy.deepcopy(Outer()) for _ in range(2)]
    x = numbers(SAMPLES, TIME, WIDTH)

    def run(group: Collective) -> None:
        model = models[group.rank]
        with pytest.raises(ConfigError, match=sentence):
            split_model(model, {"block": "heads"}, lambda: group, group.rank, group.size, example=x)
        assert_close(model(x), plain["block"](x), 0.0, "the model that was left")

    run_replicas(2, run)


def test_what_cannot_be_split_by_heads_says_why() -> None:
    def refused(model: nn.Module, size: int = 2) -> str:
        with pytest.raises(ConfigError) as caught:
            split_model(model, {"": "heads"}, lambda: None, 0, size)  # type: ignore[arg-type, return-value]
        return str(caught.value)

    assert "has 4 heads, too few for a tensor degree of 5: a degree of up to 4 fits" in refused(Packed(), 5)
    assert "has 2 heads of keys and values, too few" in refused(Separate(4, 2), 3)
    assert "must have an integer attribute of the name heads, num_heads" in refused(nn.Linear(3, 3))
    assert "add_bias_kv or add_zero_attn" in refused(nn.MultiheadAttention(4, 2, add_zero_attn=True))
