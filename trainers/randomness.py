"""Random numbers that depend on what is computed, not on when or where: a resumed run draws the same."""

from __future__ import annotations

import random

import numpy as np
import torch

_GENERATOR_SEEDS = 2**63


def seed_everything(seed: int) -> None:
    """Seed every generator that a task's `build_model` may draw from: the same weights on every worker."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the global generator is the one a task may use
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed torch for one step of one replica, from the run's seed, the step and the rank alone."""
    mixed = ((seed * 1_000_003 + step) * 4099 + rank) % _GENERATOR_SEEDS
    torch.default_generator.manual_seed(mixed)
    if device.type == "cuda":
        torch.cuda.manual_seed(mixed)
