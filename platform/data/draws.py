"""Random numbers for changing samples at random: arithmetic in the seed, the epoch and the sample.

So a sample is changed alike whatever the number of workers, after a restart and after a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import numpy as np
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from orchestray.platform.data.order import Indices
from orchestray.platform.errors import TaskError

_SAMPLE = 2
"""Purpose of these draws, beside those of `order.py`."""


class SampleDraws(Sequence[np.random.Generator]):
    """A generator for each sample of a batch, made when it is first asked for."""

    def __init__(self, sample_ids: Indices, *, seed: int, epoch: int) -> None:
        """Prepare the generators.

        Args:
            sample_ids: index of each sample in the dataset.
            seed: seed of the run.
            epoch: number of the epoch.
        """
        self._ids = sample_ids
        self._seed, self._epoch = seed, epoch
        self._made: dict[int, np.random.Generator] = {}

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> np.random.Generator: ...
    @overload
    def __getitem__(self, index: slice) -> SampleDraws: ...
    def __getitem__(self, index: int | slice) -> np.random.Generator | SampleDraws:
        if isinstance(index, slice):
            return SampleDraws(self._ids[index], seed=self._seed, epoch=self._epoch)
        place = range(len(self._ids))[index]
        if place not in self._made:
            key = (self._epoch, _SAMPLE, int(self._ids[place]))
            self._made[place] = np.random.Generator(np.random.PCG64(np.random.SeedSequence(self._seed, spawn_key=key)))
        return self._made[place]


class TorchDraws(TorchFunctionMode):
    """A context in which torch's random functions, called by this thread, draw from one sample's generator.

    So `torchvision.transforms.v2` can be used: it knows no generator of its own. The generator of the process, which
    the training uses at the same time, is left alone.
    """

    def __init__(self, draws: np.random.Generator) -> None:
        """Prepare the context.

        Args:
            draws: generator of the sample.
        """
        super().__init__()
        self._generator = torch.Generator().manual_seed(int(draws.integers(2**63)))

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function in _WITHOUT_GENERATOR:
            raise TaskError(
                f"a change of samples calls torch's {function.__name__}, whose random numbers are those of the whole "
                "process: draw by the sample's generator instead"
            )
        own = dict(kwargs or {})
        if function in _DRAWING and own.get("generator") is None:
            own["generator"] = self._generator
        return function(*args, **own)


_WITHOUT_GENERATOR = frozenset(
    {
        *(torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout, torch.rrelu),
        *(functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d, functional.rrelu),
        *(functional.alpha_dropout, functional.feature_alpha_dropout, functional.gumbel_softmax),
    }
)
_DRAWING = frozenset(
    {
        *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.bernoulli, torch.multinomial),
        *(torch.rand_like, torch.randn_like, torch.randint_like),
        *(torch.poisson, torch.binomial, torch._standard_gamma, torch._sample_dirichlet),
        *(torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.random_, torch.Tensor.bernoulli_),
        *(torch.Tensor.exponential_, torch.Tensor.geometric_, torch.Tensor.log_normal_, torch.Tensor.cauchy_),
        *(torch.Tensor.bernoulli, torch.Tensor.multinomial),
    }
)
