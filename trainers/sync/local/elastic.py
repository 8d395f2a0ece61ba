"""Elastic averaging: replicas that train alone, each tied to a common centre by a spring.

Zhang, Choromanska and LeCun, "Deep Learning with Elastic Averaging SGD" (2015): equations 5 and 6 when synchronous,
algorithm 1 when asynchronous. With a momentum in `train.optimizer` it is EAMSGD (equation 7): the spring acts in
addition to the momentum, not through it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.flat_tensors import FlatTensors
from orchestray.trainers.core.exchange import LocalTensor
from orchestray.trainers.layout.tensor_slice import TensorSlice
from orchestray.trainers.sync.common.local_updates import LocalUpdates
from orchestray.trainers.sync.local.compressed_center import CodedServedCentre, CodedSharedCentre, Coding
from orchestray.trainers.sync.local.elastic_center import Centre, Pull, ServedCentre, SharedCentre

_KEY = "centre."


class ElasticAveraging(LocalUpdates):
    """Replicas that train alone; every `every` steps each is pulled to the centre, and the centre to it, equally:

        x_i <- x_i + move_i - alpha (x_i - centre),    centre <- centre + sum_i alpha (x_i - centre)

    Here x_i is the replica's model at the beginning of the step, and move_i its optimizer's step there. So what the
    replicas need of each other is in flight while they compute. The centre is the model that is trained: it is
    validated, saved and kept.

    Args:
        every: steps between two pulls.
        alpha: fraction of the distance that is moved; None: 0.9 / replicas. 0: the replicas are on their own.
        consistency: "synchronous": all pull at the same step. "asynchronous": the first replica keeps the centre, and
            each of the others pulls when it reaches the step.
        compression: the config's `strategy.compression` section, of any type but `dgc` and `powersgd`, for the
            distances that are sent. See `compressed_center`.
        seed: seed of the run, for random rounding.
    """

    def __init__(
        self,
        every: int = 1,
        alpha: float | None = None,
        consistency: Literal["synchronous", "asynchronous"] = "synchronous",
        compression: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._compression = dict(compression or {"type": "none"})
        self._seed = seed
        self._every = every
        self._wanted_alpha = alpha
        self._is_shared = consistency == "synchronous"
        self._flat = FlatTensors([])
        self._names: list[str] = []
        """Names of the tensors that are pulled."""
        self._centre: Centre | None = None
        self._pull: Pull | None = None
        self._num_pulls = 0
        """Number of pulls that have moved this replica."""
        self._earlier = 0, 0
        """Bytes asked of earlier centres, and saved by them."""

    @property
    def alpha(self) -> float:
        if self._wanted_alpha is not None:
            return self._wanted_alpha
        return 0.9 / self.joined().size

    def attach(self, model: nn.Module, collective: Collective, pieces: Mapping[str, TensorSlice] | None = None) -> None:
        super().attach(model, collective, pieces)
        self._flat = FlatTensors(self._shared)
        self._names = [name for name, held in self._own.items() if held.tensor.is_floating_point()]

    def detach(self) -> None:
        self._close_centre()
        self._pull = None
        super().detach()

    def before_step(self, step: int) -> None:
        super().before_step(step)
        self.step_metrics = {}
        centre = self._known_centre()
        if step % self._every == 0:
            self._pull = centre.meet(self._flat.pack(), step)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        if self._pull is None:
            return
        pulls, self._pull = self._pull.wait(), None
        self._num_pulls += 1
        torch._foreach_sub_(self._shared, self._flat.views(pulls))
        self._count_bytes()
        if self.alpha > 0:
            square = sum(float(pull.double().square().sum()) for pull in pulls)
            self.step_metrics = {"disagreement": square**0.5 / self.alpha}

    def _known_centre(self) -> Centre:
        """Return the centre; if none was loaded, make it from the replicas' parameters before their first step.

        It is not made in `attach`, because a checkpoint may be loaded later. All replicas come here together.
        """
        if self._centre is None:
            self._centre = self._new_centre(self._flat.pack())
        return self._centre

    def _new_centre(self, start: list[Tensor]) -> Centre:
        collective = self.joined()
        if self._compression["type"] == "none" or collective.size == 1:
            return (SharedCentre if self._is_shared else ServedCentre)(start, self.alpha, collective)
        coding = Coding(self._compression, self._flat, self._seed, self._statistics)
        return (CodedSharedCentre if self._is_shared else CodedServedCentre)(start, self.alpha, collective, coding)

    def run_report(self) -> dict[str, Any]:
        """Return how often this replica and the centre have pulled each other, `pulls`; empty before the first time."""
        return {"pulls": self._num_pulls} if self._num_pulls else {}

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """Replace the model by the centre inside."""
        own = self._flat.pack()
        try:
            self.agree()
            yield
        finally:
            self._flat.unpack(own)

    def agree(self) -> None:
        """Take the centre."""
        self._flat.unpack(self._known_centre().values())

    def state(self) -> dict[str, LocalTensor]:
        """Return the centre on the first replica, and nothing on the others. All replicas call this."""
        views = self._flat.views(self._known_centre().values_here())
        if self.joined().rank != 0:
            return {}
        return {
            _KEY + name: LocalTensor(view, self._own[name].piece) for name, view in zip(self._names, views, strict=True)
        }

    def wanted(self) -> dict[str, TensorSlice]:
        if self.joined().rank != 0:
            return {}
        return {_KEY + name: self._own[name].piece for name in self._names}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the centre on the first replica and send it to the others. All replicas call this."""
        collective = self.joined()
        if collective.rank == 0:
            flats = FlatTensors([tensors[_KEY + name].to(self._own[name].tensor) for name in self._names]).pack()
        else:
            flats = self._flat.pack()
        for flat in flats:
            collective.broadcast(flat, 0)
        self._close_centre()
        self._centre = self._new_centre(flats)

    def _close_centre(self) -> None:
        if self._centre is not None:
            self._centre.close()
            self._count_bytes()
            self._earlier = self.asked_bytes, self.bytes_saved
            self._centre = None

    def _count_bytes(self) -> None:
        """Add the bytes of the present centre to those of earlier ones."""
        assert self._centre is not None
        self.asked_bytes = self._earlier[0] + self._centre.asked_bytes
        self.bytes_saved = self._earlier[1] + self._centre.saved_bytes
