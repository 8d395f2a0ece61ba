"""The cached transformer is the model, and a row of it depends on no other."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.errors import ConfigError
from orchestray.serving.generation.decoder import TransformerDecoder
from orchestray.serving.generation.request import Request
from orchestray.serving.generation.sampling import Sampling
from orchestray.serving.generation.scheduler import BlockPool, Scheduler
from orchestray.serving.models.quantize import quantize_int8
from support.generation import small_model

CONTEXT = 700
"""More keys than are looked at in one product."""


def logits_of(decoder: TransformerDecoder, requests: list[Request], budget: int) -> dict[int, Tensor]:
    """Return the logits of each request, by its number: [tokens, vocabulary]; each goes on with its likeliest token."""
    scheduler = Scheduler(BlockPool(decoder.num_blocks), max_sequences=8, token_budget=budget)
    found: dict[int, list[Tensor]] = {request.number: [] for request in requests}
    for request in requests:
        scheduler.add(request)
    while (step := scheduler.plan()).num_tokens:
        pieces = [piece for piece in (*step.reading, *step.answering) if piece.is_last]
        for piece, row in zip(pieces, decoder.step(step), strict=True):
            request = piece.request
            found[request.number].append(row)
            request.tokens.append(int(row.argmax()))
            if request.num_generated == request.sampling.max_tokens:
                scheduler.remove(request)
    return {number: torch.stack(rows) for number, rows in found.items()}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.set_num_threads(1)
    return small_model(context=CONTEXT, depth=2)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 32), (torch.float32, 64), (torch.float64, 32)])
def test_cached_logits_are_those_of_the_whole_model_and_the_same_bits_in_any_company(
    model: nn.Module, dtype: torch.dtype, width: int
) -> None:
    def made() -> nn.Module:
        return small_model(context=CONTEXT, width=width, depth=2).to(dtype)

    decoder = TransformerDecoder(made(), max_rows=96, max_sequences=8)
    rng = random.Random(1)
    prompts = [[rng.randrange(256) for _ in range(size)] for size in (1, 16, 33, 250, 400, 690, 20)]
    counts = [rng.randrange(1, 6) for _ in prompts]

    def asked(number: int) -> Request:
        return Request(prompts[number], Sampling(max_tokens=counts[number]), CONTEXT, number)

    requests = [asked(number) for number in range(len(prompts))]
    together = logits_of(decoder, requests, 96)
    plain = made()
    for number, request in enumerate(requests):
        alone = logits_of(decoder, [asked(number)], 32)[number]
        assert torch.equal(alone, together[number])
        with torch.no_grad():
            whole = plain(torch.tensor([request.tokens[:-1]]))[0, len(prompts[number]) - 1 :]
        torch.testing.assert_close(together[number], whole, rtol=1e-4, atol=1e-3 if dtype == torch.float32 else 1e-9)


@pytest.mark.parametrize(("precision", "quantized", "share"), [("bfloat16", False, 0.05), ("float32", True, 0.05)])
def test_in_fewer_bits_it_is_the_model_in_as_many_and_the_same_bits_in_any_company(
    precision: str, quantized: bool, share: float
) -> None:
    def made() -> nn.Module:
        model = small_model(context=CONTEXT, depth=2)
        return quantize_int8(model) if quantized else model

    decoder = TransformerDecoder(made(), max_rows=96, max_sequences=8, precision=precision)
    rng = random.Random(2)
    prompts = [[rng.randrange(256) for _ in range(size)] for size in (1, 16, 33, 300, 20)]

    def asked(number: int) -> Request:
        return Request(prompts[number], Sampling(max_tokens=3), CONTEXT, number)

    requests = [asked(number) for number in range(len(prompts))]
    together = logits_of(decoder, requests, 96)
    plain, exact = made(), small_model(context=CONTEXT, depth=2)
    for number, request in enumerate(requests):
        assert torch.equal(logits_of(decoder, [asked(number)], 32)[number], together[number])
        tokens, first = torch.tensor([request.tokens[:-1]]), len(prompts[number]) - 1
        with torch.no_grad():
            full = exact(tokens)[0, first:]
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
                whole = plain(tokens)[0, first:].float()
        assert together[number].dtype == torch.float32
        assert float((together[number] - whole).norm() / whole.norm()) < share
        assert not torch.allclose(whole, full, rtol=1e-4, atol=1e-3)  # they are fewer bits indeed


def test_the_model_itself_is_left_alone(model: nn.Module) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    decoder = TransformerDecoder(model, max_rows=32, max_sequences=2)
    logits_of(decoder, [Request([1, 2, 3], Sampling(max_tokens=3), CONTEXT, 0)], 32)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_row_sizes_are_those_in_which_a_row_is_the_same_bits_as_among_the_most(model: nn.Module) -> None:
    decoder = TransformerDecoder(model, max_rows=100, max_sequences=2)
    layer = nn.Linear(32, 96)
    layer.load_state_dict(model[1].query_key_value.state_dict())  # type: ignore[index]
    inputs = torch.randn(decoder.row_sizes[-1], 32)
    assert decoder.row_sizes[-1] == 112
    for size in decoder.row_sizes:
        assert torch.equal(layer(inputs[:size].clone()), layer(inputs)[:size])


def test_the_cache_takes_the_bytes_of_its_blocks(model: nn.Module) -> None:
    decoder = TransformerDecoder(model, max_rows=32, num_blocks=50)
    assert decoder.cache_bytes == 2 * 2 * 51 * 16 * 32 * 4  # keys and values, layers, blocks, tokens, width, float32


def test_a_cache_too_small_for_one_request_is_refused(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"43 blocks of 16 tokens.*wanted at least 44"):
        TransformerDecoder(model, num_blocks=43)


@pytest.mark.parametrize("other", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))])
def test_a_model_of_another_kind_is_refused_with_a_way_out(other: nn.Module) -> None:
    with pytest.raises(ConfigError, match="give the task a method decoder"):
        TransformerDecoder(other)
