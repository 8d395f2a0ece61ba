"""Compression of what one worker sends: a list of tensors in, one flat message of bytes out, and back.

A compressor is made twice with the same arguments and the same shapes, once where a message is made and once where it
is read; so a message holds no shapes, no types and no settings. All that is kept between two messages is in `state`.
Error feedback (Seide et al. 2014, section 3.1; Karimireddy et al. 2019, algorithm 1): what a message lost is added to
what the next one carries, so that the sum of all messages and the residual is the sum of all gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from orchestray.trainers.compression.bits import as_bytes, from_bytes, parts_of
from orchestray.trainers.compression.sparse import pack, unpack

__all__ = ["Compressor", "SparseCompressor", "as_bytes", "from_bytes"]


class Compressor(ABC):
    """Compresses the gradients of ONE worker, whose shapes never change.

    A scheme is written in `_encode` and `_decode`, on one flat vector of all tensors. Tensors that the scheme would not
    make smaller (`_coded_bytes`) travel as they are, behind the rest.

    Args:
        error_feedback: add what a message lost to what the next one carries.
        seed: of the run. Random draws depend on it, on `worker` and on the step, and on nothing else.
        worker: who sends, from 0. Nothing that the reader of a message must know.
        num_workers: how many send.
    """

    is_sparse: ClassVar[bool] = False
    """Whether a message is a few of the values with their places: then it is a `SparseCompressor`."""

    def __init__(self, *, error_feedback: bool, seed: int = 0, worker: int = 0, num_workers: int = 1) -> None:
        self._error_feedback = error_feedback
        self._seed, self._worker, self._num_workers = seed, worker, num_workers
        self._templates: list[Tensor] = []
        self._order: list[int] = []
        self._sizes: list[int] = []
        """Elements of each tensor, in the order of the flat vector."""
        self._num_coded = 0
        """How many of the tensors, the first in the flat vector, the scheme codes."""
        self._flat = torch.empty(0)
        """What was last compressed; with error feedback, what it lost."""
        self._views: list[Tensor] = []
        self._last: Tensor | None = None
        """Without error feedback: the last message before `_seal`, for `error_norm`."""

    # -- what others call ----------------------------------------------------------------------------------------------

    def init(self, templates: Sequence[Tensor]) -> None:
        """Begin anew, for tensors of these shapes, types and devices; their values are not read.

        Computes in float64 if one of them has it, else in float32.
        """
        self._templates = [torch.empty_like(template, device="meta") for template in templates]
        device = templates[0].device if templates else torch.device("cpu")
        wide = any(template.dtype == torch.float64 for template in templates)
        self._flat = torch.zeros(0, dtype=torch.float64 if wide else torch.float32, device=device)
        value_bytes = self.value_bytes
        raw = [self._coded_bytes(template.shape) >= template.numel() * value_bytes for template in templates]
        self._order = sorted(range(len(templates)), key=lambda index: raw[index])  # stable: raw ones last
        self._sizes = [templates[index].numel() for index in self._order]
        self._num_coded = len(raw) - sum(raw)
        self._flat = self._flat.new_zeros(sum(self._sizes))
        self._views = self._split(self._flat)
        self._last = None
        self._start()

    @torch.no_grad()
    def compress(self, tensors: Sequence[Tensor], *, step: int) -> Tensor:
        """A message that stands for `tensors`, and for what earlier messages lost; keeps what this one loses.

        Args:
            tensors: as the templates of `init`; none is None (zeros stand for a gradient that is not there). They are
                not changed.
            step: of the run; the same step draws the same random numbers.

        Returns:
            uint8 [bytes].

        Raises:
            ValueError: more or fewer tensors, or of other shapes.
        """
        self._take(tensors)
        plain = self._pack(self._flat, step)
        if self._error_feedback:
            self._flat -= self._unpack(plain)
        else:
            self._last = plain
        return self._seal(plain)

    @torch.no_grad()
    def decompress(self, message: Tensor) -> list[Tensor]:
        """What a message stands for, of whichever worker: tensors as the templates of `init`.

        Reads nothing of this compressor's state, so one reader serves all senders.

        Raises:
            ValueError: the message is not as long as such a message is.
        """
        return self._handed_out(self._unpack(self._unseal(message)))

    def state(self) -> dict[str, Tensor]:
        """What is kept between two messages, by name: the tensors themselves, no copies. Empty if nothing is."""
        return {"residual": self._flat} if self._error_feedback else {}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what was `state` of a compressor with the same arguments and shapes.

        Raises:
            KeyError: a tensor is missing.
        """
        for name, tensor in self.state().items():
            tensor.copy_(state[name])

    def views(self, flat: Tensor) -> list[Tensor]:
        """Of one of the tensors of `state`, as long as all templates together: views of it, one a template."""
        tensors: list[Tensor] = [flat] * len(self._order)
        for index, view in zip(self._order, self._split(flat), strict=True):
            tensors[index] = view
        return tensors

    @property
    def dense_bytes(self) -> int:
        """What the tensors are long, uncompressed."""
        return sum(template.numel() * template.element_size() for template in self._templates)

    @property
    def message_bytes(self) -> int | None:
        """The length of every message; None if it differs from one to the next."""
        coded = self._fixed_bytes()
        return None if coded is None else coded + self._num_raw_values * self.value_bytes

    @property
    def error_norm(self) -> float:
        """The 2-norm of what the last message lost; 0 before the first."""
        if self._error_feedback:
            return float(self._flat.norm())
        if self._last is None:
            return 0.0
        return float((self._flat - self._unpack(self._last)).norm())

    @property
    def value_bytes(self) -> int:
        """Bytes of a value as it is computed with, and sent where a scheme sends values: 4, or 8 in float64."""
        return self._flat.element_size()

    # -- what a scheme says --------------------------------------------------------------------------------------------

    @abstractmethod
    def _encode(self, flat: Tensor, step: int) -> Tensor:
        """The coded tensors, side by side in `flat` (sizes: `_coded_sizes`), as uint8 [bytes]; `flat` stays as is."""

    @abstractmethod
    def _decode(self, message: Tensor) -> Tensor:
        """What `_encode` made, as a new flat vector."""

    def _coded_bytes(self, shape: torch.Size) -> float:
        """About how many bytes a tensor of this shape adds to a message; as long as itself, and it is sent raw."""
        return 0

    def _fixed_bytes(self) -> int | None:
        """How many bytes `_encode` always returns; None if not always as many."""
        return None

    def _seal(self, plain: Tensor) -> Tensor:
        """A message with what loses nothing done to it last: the residual is found without undoing it."""
        return plain

    def _unseal(self, message: Tensor) -> Tensor:
        """What `_seal` was given."""
        return message

    def _start(self) -> None:  # noqa: B027 - most schemes have nothing to do
        """`init` has been called."""

    # -- what schemes use ----------------------------------------------------------------------------------------------

    @property
    def _coded_sizes(self) -> list[int]:
        return self._sizes[: self._num_coded]

    @property
    def _coded_shapes(self) -> list[torch.Size]:
        return [self._templates[index].shape for index in self._order[: self._num_coded]]

    @property
    def _num_coded_values(self) -> int:
        return sum(self._coded_sizes)

    @property
    def _num_raw_values(self) -> int:
        return sum(self._sizes[self._num_coded :])

    def _generator(self, step: int) -> torch.Generator:
        """Of this worker's draws in this step: the same whenever and however often it is asked for."""
        seed = np.random.SeedSequence([self._seed % 2**64, self._worker, step]).generate_state(1, np.uint64)
        return torch.Generator(self._flat.device).manual_seed(int(seed[0]))

    def _take(self, tensors: Sequence[Tensor]) -> None:
        """Make `_flat` what is to be sent: the tensors, and what earlier messages lost."""
        self._check(tensors)
        if not tensors:
            return
        if self._error_feedback:
            torch._foreach_add_(self._views, self._ordered(tensors))
        else:
            torch._foreach_copy_(self._views, self._ordered(tensors))

    def _check(self, tensors: Sequence[Tensor]) -> None:
        if [tensor.shape for tensor in tensors] != [template.shape for template in self._templates]:
            raise ValueError(
                f"The compressor was made for {len(self._templates)} tensors; it got {len(tensors)}, or other shapes."
            )

    def _ordered(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors in the order of the flat vector."""
        return [tensors[index] for index in self._order]

    def _pack(self, flat: Tensor, step: int) -> Tensor:
        num_coded = self._num_coded_values
        coded = self._encode(flat[:num_coded], step) if num_coded else as_bytes(flat[:0])
        return torch.cat([coded, as_bytes(flat[num_coded:])]) if self._num_raw_values else coded

    def _unpack(self, message: Tensor) -> Tensor:
        num_raw_bytes = self._num_raw_values * self.value_bytes
        coded_bytes = self._fixed_bytes()
        fixed = None if coded_bytes is None else coded_bytes + num_raw_bytes
        if message.numel() < num_raw_bytes or (fixed is not None and message.numel() != fixed):
            wanted = f"{fixed} bytes" if fixed is not None else f"at least {num_raw_bytes} bytes"
            raise ValueError(f"A message of {message.numel()} bytes was received where {wanted} are wanted.")
        num_coded_bytes = message.numel() - num_raw_bytes
        coded = self._decode(message[:num_coded_bytes]) if self._num_coded else self._flat.new_empty(0)
        if not num_raw_bytes:
            return coded
        return torch.cat([coded, from_bytes(message[num_coded_bytes:], self._flat.dtype)])

    def _split(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat vector, in its order, with the shapes of the tensors."""
        parts = zip(parts_of(flat, self._sizes), self._order, strict=True)
        return [part.view(self._templates[index].shape) for part, index in parts]

    def _handed_out(self, flat: Tensor) -> list[Tensor]:
        """The tensors of a flat vector, in the order and of the types of the templates."""
        tensors: list[Tensor] = [flat] * len(self._order)
        for index, view in zip(self._order, self._split(flat), strict=True):
            tensors[index] = view.to(self._templates[index].dtype)
        return tensors


class SparseCompressor(Compressor):
    """Sends a few of the values with their places.

    Places are those in the concatenation of all tensors in the order of the templates, so that messages of several
    workers can be merged. A message holds the values as they are (`value_bytes` each) and the places as pack_sparse
    codes them.
    """

    is_sparse: ClassVar[bool] = True

    @torch.no_grad()
    def compress_sparse(self, tensors: Sequence[Tensor], *, step: int) -> tuple[Tensor, Tensor]:
        """As `compress`, unpacked.

        Returns:
            Places, int64 [values], ascending, and the values there, of the type that is computed with.
        """
        self._take(tensors)
        indices = self._select(self._flat, step)
        values = self._flat.index_select(0, indices)
        self._sent(indices)
        return indices, values

    @torch.no_grad()
    def compress(self, tensors: Sequence[Tensor], *, step: int) -> Tensor:
        return self.pack_sparse(*self.compress_sparse(tensors, step=step))

    def pack_sparse(self, indices: Tensor, values: Tensor) -> Tensor:
        """The message of these values at these ascending places: sparse or dense, whichever is shorter."""
        return pack(indices, values, self.num_values)

    def unpack_sparse(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Places and values of a message of `pack_sparse`; of a dense one, every place.

        Raises:
            ValueError: the message is not as long as it says.
        """
        return unpack(message, self.num_values, self._flat.dtype)

    @property
    def num_values(self) -> int:
        """Elements of all tensors."""
        return self._flat.numel()

    @property
    def error_norm(self) -> float:
        return float(self._flat.norm()) if self._error_feedback else self._lost_norm

    @abstractmethod
    def _select(self, flat: Tensor, step: int) -> Tensor:
        """The places to send, int64, ascending."""

    _lost_norm: float = 0.0

    def _sent(self, indices: Tensor) -> None:
        """The values there have been sent: what stays in `_flat` is lost, or is the residual."""
        self._flat.index_fill_(0, indices, 0.0)
        if not self._error_feedback:
            self._lost_norm = float(self._flat.norm())

    def _encode(self, flat: Tensor, step: int) -> Tensor:
        indices = self._select(flat, step)
        return self.pack_sparse(indices, flat.index_select(0, indices))

    def _decode(self, message: Tensor) -> Tensor:
        indices, values = self.unpack_sparse(message)
        return self._flat.new_zeros(self.num_values).index_copy_(0, indices, values)
