"""Random numbers that depend on what is computed, not on when or where: a resumed run draws the same numbers.

Modules that draw random numbers in the forward pass, such as dropout, are seeded at each call. The seed comes from the
run's seed, the step, the replica, the micro-batch and the module's name. So a pipeline stage draws the same numbers as
one process would, on any worker and for any order of micro-batches. A second forward pass that recomputes the first
also draws the same numbers.
"""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from orchestray.platform.process.alike import ALONE, torch_state
from orchestray.platform.process.gc_control import pause
from orchestray.platform.process.gpu import gpus_touched

_GENERATOR_SEEDS = 2**63


@dataclass
class RngKey:
    """The inputs of the seeds of a forward pass. The loop changes it, seeded modules read it."""

    seed: int = 0
    step: int = 0
    replica: int = 0
    """Index on the data axis."""
    micro_batch: int = 0
    """Index in the batch, from 0."""


class FollowsSteps(nn.Module):
    """A module whose state changes once a step, by the samples of the whole batch.

    Its buffers are whole numbers, of which replicas take the largest after each step.

    Attributes:
        draw: position of the run; None outside of one.
        is_counted: False in a pass that counts nowhere.
    """

    draw: RngKey | None = None
    is_counted: bool = True


@contextlib.contextmanager
def building(seed: int) -> Iterator[None]:
    """Set the seed of every generator, and let no other thread build or check a model inside the context."""
    with ALONE:
        seed_everything(seed)
        yield


@contextlib.contextmanager
def generators_put_back() -> Iterator[None]:
    """Give every generator its state back afterwards, and let no other thread build or check a model inside."""
    with ALONE:
        torch_state, *cuda_states = generator_states()
        numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002
        try:
            yield
        finally:
            torch.set_rng_state(torch_state)
            np.random.set_state(numpy_state)  # noqa: NPY002
            random.setstate(python_state)
            if cuda_states:
                torch.cuda.set_rng_state_all(cuda_states)


def seed_everything(seed: int) -> None:
    """Set the seed of every generator that a task's `build_model` may use: all workers get the same weights."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the global generator is the one a task may use
    torch.default_generator.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)  # also of GPUs that start later, which else draw their own seed


def seed_pass(draw: RngKey, device: torch.device, key: int = 0) -> None:
    """Set torch's seed for a forward pass of a micro-batch, or for a module's call in it.

    Args:
        draw: step, replica and micro-batch.
        device: device of the model.
        key: number of the module; 0 is for code that draws outside the modules that are seeded by name.
    """
    mixed = (draw.seed * 1_000_003 + draw.step) * 4099 + draw.replica
    _seed(((mixed * 65_537 + draw.micro_batch) * 4_294_967_311 + key) % _GENERATOR_SEEDS, device)


def seed_modules(model: nn.Module, draw: RngKey, device: torch.device) -> list[torch.utils.hooks.RemovableHandle]:
    """Make every module that draws random numbers in training seed torch at each call, by its name in the model.

    Modules that follow steps get the same key.

    Returns:
        Handles that remove the hooks.
    """
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, FollowsSteps):
            module.draw = draw
        if draws(module):
            key = zlib.crc32(name.encode()) + 1

            def seed(called: nn.Module, _inputs: object, key: int = key) -> None:
                if called.training:
                    seed_pass(draw, device, key)

            handles.append(module.register_forward_pre_hook(seed))
    return handles


def draws(module: nn.Module) -> bool:
    """Return True if a module is known to draw random numbers while training.

    A user's module that does so (for example by calling `functional.dropout`) declares it with an attribute
    `draws_random = True`.
    """
    if isinstance(module, _DropoutNd):
        return bool(module.p > 0)
    if isinstance(module, nn.MultiheadAttention):
        return bool(module.dropout > 0)
    if isinstance(module, nn.RNNBase):
        return bool(module.dropout > 0)
    return isinstance(module, nn.RReLU) or bool(getattr(module, "draws_random", False))


@contextlib.contextmanager
def without_draws(model: nn.Module) -> Iterator[None]:
    """Put the modules that are known to draw random numbers into evaluation mode inside, and none beside them."""
    drawing = [module for module in model.modules() if module.training and draws(module)]
    for module in drawing:
        module.training = False
    try:
        yield
    finally:
        for module in drawing:
            module.training = True


def generator_states() -> list[torch.Tensor]:
    """Return the states of torch's generators, which change when a number is drawn."""
    with pause():  # see `torch_state`
        return [torch_state(), *(torch.cuda.get_rng_state_all() if gpus_touched() else [])]


def _seed(seed: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
