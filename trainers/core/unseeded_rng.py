"""A search for modules that draw unseeded random numbers, which depend on the layout.

`rng.seed_modules` seeds the modules that are known to draw (see `rng.draws`) by their names. So they draw the same
numbers wherever and whenever they are called. A module that draws in its own forward, for example by
`functional.dropout`, is unknown unless it declares it.
"""

from __future__ import annotations

import contextlib
import random
import zlib
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from orchestray.platform.data.nested import map_tensors
from orchestray.trainers.core.buffers import untouched
from orchestray.trainers.core.inputs import call
from orchestray.trainers.core.own_gradients import WithoutGradients
from orchestray.trainers.core.rng import draws, generators_put_back

_RUN_SEEDS = (11, 7919)
_MODULE_SEED = 5


def unseeded_modules(model: nn.Module, inputs: Any) -> list[str]:
    """Return the names of the modules that draw random numbers while training and are not known to.

    Runs pairs of forward passes, with the generators of torch, NumPy and Python in different states; known modules are
    seeded alike. A module with equal inputs but different outputs in a pair draws random numbers, or a module inside it
    does. There is one pair after each find, and one more. Buffers, gradients and generators are restored.

    Args:
        model: a whole model in the modes of training, not yet split over workers.
        inputs: input of the model, with at least two samples (batch normalisation needs them).

    Returns:
        Names in the order of `model.named_modules()`; "" is the model itself.
    """
    names = {module: name for name, module in model.named_modules()}
    known = {module for module in names if draws(module)}
    found: set[nn.Module] = set()
    with generators_put_back():
        while new := _differing(model, inputs, known, found) - found:
            found |= new
    return [name for module, name in names.items() if module in found]


def repeated_draws(model: nn.Module, inputs: Any) -> list[str]:
    """Return the names of the modules that a forward pass calls several times and that draw the same numbers each time.

    They are seeded by their name at each call, and the name does not change. Arguments and side effects are those of
    `unseeded_modules`.
    """
    known = {module for module in model.modules() if draws(module)}
    with generators_put_back():
        calls = Counter(call.module for call in _Watch(model, known, set(), _RUN_SEEDS[0]).run(inputs))
    return [name for name, module in model.named_modules() if module in known and calls[module] > 1]


def repeated_warning(names: list[str]) -> str:
    """Return the warning about the modules that `repeated_draws` found; "" for none."""
    if not names:
        return ""
    one = len(names) == 1
    return (
        f"{'Module' if one else 'Modules'} {', '.join(map(repr, names))} {'is' if one else 'are'} called several times "
        "in a forward pass and will draw the same random numbers each time (a dropout drops the same units). Give each "
        "place a module of its own."
    )


def unseeded_warning(model: nn.Module, names: list[str]) -> str:
    """Return the warning about the modules that `unseeded_modules` found; "" for none."""
    if not names:
        return ""
    modules = dict(model.named_modules())
    shown = ", ".join(
        f"{name!r} ({type(modules[name]).__name__})" if name else f"the model itself ({type(model).__name__})"
        for name in names
    )
    one = len(names) == 1
    return (
        f"{'Module' if one else 'Modules'} {shown} {'draws' if one else 'draw'} random numbers of "
        f"{'its' if one else 'their'} own, so the results depend on the layout and on restarts. Use a module such as "
        "nn.Dropout in place of the function, or give the class the attribute draws_random = True and draw by torch's "
        "default generator alone."
    )


def _differing(model: nn.Module, inputs: Any, known: set[nn.Module], pinned: set[nn.Module]) -> set[nn.Module]:
    """Return the innermost modules whose outputs differ between two passes although their inputs do not."""
    first, second = (_Watch(model, known, pinned, seed).run(inputs) for seed in _RUN_SEEDS)
    found: set[nn.Module] = set()
    # A call ends after the calls inside it, so differences inside are known before it is compared.
    blamed: set[int] = set()
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one.module is not other.module:
            found |= _chooser(first, second, index)  # later calls cannot be compared
            break
        if one.inputs == other.inputs and one.outputs != other.outputs and not blamed.intersection(one.inside):
            found.add(one.module)
        if one.module in found:
            blamed.add(one.number)
    return found


def _chooser(first: list[_Call], second: list[_Call], index: int) -> set[nn.Module]:
    """Return the module whose two passes call different modules at call `index`."""
    callers = []
    for calls in (first, second):
        number = calls[index].number
        callers.append(next((call for call in calls[index:] if number in call.inside), calls[index]))
    return {min((caller.module for caller in callers), key=lambda module: sum(1 for _ in module.modules()))}


class _Call:
    """A module's call in a pass, with checksums of its inputs and outputs."""

    def __init__(self, module: nn.Module, number: int, inputs: int) -> None:
        self.module = module
        self.number = number
        self.inputs = inputs
        self.outputs = 0
        self.inside: list[int] = []
        """Numbers of the calls inside this one, at any depth."""


class _Watch:
    """A recorded pass in which modules not known to draw find the generators in a state of this pass.

    Known modules find torch's generator in the same state in every pass, like those seeded by `rng.seed_modules`.
    Pinned modules find all generators in the same state.
    """

    def __init__(self, model: nn.Module, known: set[nn.Module], pinned: set[nn.Module], seed: int) -> None:
        self._model = model
        self._seeded = known | pinned
        self._pinned = pinned
        self._seed = seed
        self._num_seeded = 0
        self._open: list[_Call] = []
        self._ended: list[_Call] = []
        self._num_calls = 0
        self._keys = {module: _MODULE_SEED + zlib.crc32(name.encode()) for name, module in model.named_modules()}

    def run(self, inputs: Any) -> list[_Call]:
        """Return the calls of a forward pass, in the order of their ends."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(untouched(self._model))  # each pass begins with the same buffers
            for module in self._keys:
                stack.callback(module.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(self._end).remove)
            WithoutGradients()(self._pass, inputs)
        return self._ended

    def _pass(self, inputs: Any) -> None:
        self._open, self._ended, self._num_calls, self._num_seeded = [], [], 0, 0
        self._scramble()
        call(self._model, map_tensors(torch.clone, inputs))  # which a model may change in place

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._open.append(_Call(module, self._num_calls, _checksum((args, kwargs))))
        self._num_calls += 1
        if module in self._seeded:
            (_seed_all if module in self._pinned else _seed_torch)(self._keys[module])

    def _end(self, module: nn.Module, _args: Any, outputs: Any) -> None:
        call = self._open.pop()
        call.outputs = _checksum(outputs)
        self._ended.append(call)
        if self._open:
            self._open[-1].inside += [call.number, *call.inside]
        if module in self._seeded and not any(outer.module in self._seeded for outer in self._open):
            self._scramble()

    def _scramble(self) -> None:
        self._num_seeded += 1
        _seed_all(self._seed + 31 * self._num_seeded)


def _checksum(values: Any) -> int:
    """Return a checksum of the bits of all tensors in `values`."""
    checksum = 0
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            data = leaf.detach()
            while torch._C._functorch.is_functorch_wrapped_tensor(data):  # inside of vmap and the like
                data = torch._C._functorch.get_unwrapped(data)
            data = data.to("cpu").contiguous().reshape(-1)
            checksum = zlib.crc32(data.view(torch.uint8).numpy().data, checksum) if data.numel() else checksum
    return checksum


def _seed_torch(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)


def _seed_all(seed: int) -> None:
    _seed_torch(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the global generator is the one a module may use
    random.seed(seed)
