"""Draws have the distribution that was asked for, and depend on their own row and seed alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from orchestray.serving.generation.sampling import Sampling
from orchestray.serving.generation.step_thread import pick
from orchestray.serving.models.errors import InputError

LOGITS = torch.tensor([2.0, 0.0, 1.0, -1.0, 1.5])


def frequencies(sampling: Sampling, num_draws: int = 20_000) -> torch.Tensor:
    draws = sampling.model_copy(update={"seed": 3}).draws()
    uniforms = [draws.random() for _ in range(num_draws)]
    tokens = pick(LOGITS.expand(num_draws, -1), [sampling] * num_draws, uniforms)
    return torch.bincount(torch.tensor(tokens), minlength=len(LOGITS)) / num_draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [0, 1, 2, 3, 50])
def test_frequencies_are_the_softmax_of_the_likeliest_tokens(temperature: float, top_k: int) -> None:
    kept = LOGITS.topk(min(top_k or 5, 5)).indices
    wanted = torch.zeros(5)
    wanted[kept] = (LOGITS[kept] / temperature).softmax(0)
    found = frequencies(Sampling(temperature=temperature, top_k=top_k))
    # Five standard deviations of a frequency over 20,000 draws.
    assert float((found - wanted).abs().max()) <= 5 * 0.5 / 20_000**0.5
    assert bool((found[wanted == 0] == 0).all())


@pytest.mark.parametrize(("top_p", "top_k", "kept"), [(0.1, 0, 1), (0.6, 0, 2), (0.9, 0, 3), (0.9, 2, 2), (1.0, 0, 5)])
def test_top_p_keeps_the_fewest_of_the_likeliest_tokens_that_have_it_together(
    top_p: float, top_k: int, kept: int
) -> None:
    wanted = torch.zeros(5)
    likeliest = LOGITS.topk(kept).indices
    wanted[likeliest] = LOGITS[likeliest].softmax(0)
    found = frequencies(Sampling(temperature=1.0, top_p=top_p, top_k=top_k))
    assert float((found - wanted).abs().max()) <= 5 * 0.5 / 20_000**0.5
    assert bool((found[wanted == 0] == 0).all())


def test_without_temperature_it_is_the_likeliest_and_near_none_too() -> None:
    assert pick(LOGITS[None], [Sampling()], [0.99]) == [0]
    assert pick(LOGITS[None], [Sampling(temperature=1e-300)], [0.999999]) == [0]


def test_a_row_is_drawn_the_same_alone_and_among_others() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, 256, generator=generator)
    samplings = [Sampling(temperature=0.7 * (row % 3), top_k=row % 7, top_p=1 - row % 5 / 8) for row in range(40)]
    uniforms = torch.rand(40, generator=generator).tolist()
    together = pick(logits, samplings, uniforms)
    alone = [pick(logits[row : row + 1], [samplings[row]], [uniforms[row]])[0] for row in range(40)]
    assert together == alone


def test_the_ends_of_the_draw_stay_among_the_likeliest() -> None:
    for uniform in (0.0, 1.0 - 2**-53):
        assert pick(LOGITS[None], [Sampling(temperature=1.0, top_k=2)], [uniform])[0] in {0, 4}


def test_the_likeliest_token_is_drawn_however_small_the_probability_that_is_kept() -> None:
    assert pick(LOGITS[None], [Sampling(temperature=1.0, top_p=5e-324)], [0.9]) == [int(LOGITS.argmax())]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_p": 1.5}, "top_p"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"stop": ("",)}, "stop[0]"),
        ({"stop": ("x",) * 17}, "stop"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as refused:
        Sampling(**wrong)
    assert refused.value.field == field
