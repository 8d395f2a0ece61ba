"""Compression of the messages of one worker: from a list of tensors to one flat message of bytes, and back.

Sender and receiver each create a compressor with the same arguments and shapes. So a message contains no shapes, types
or settings. All that is kept between two messages is in `state`.

Error feedback (Seide et al. 2014, section 3.1; Karimireddy et al. 2019, algorithm 1) adds what a message lost to the
next one. So the sum of all messages and the residual is the sum of all gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from orchestray.trainers.compression.bits import as_bytes, from_bytes, parts_of
from orchestray.trainers.compression.sparse import pack, unpack

__all__ = ["Compressor", "SparseCompressor", "as_bytes", "from_bytes"]


class Compressor(ABC):
    """Compresses the gradients of ONE worker, whose shapes never change.

    A scheme implements `_encode` and `_decode` on one flat vector of all tensors. Tensors that the scheme would not
    make smaller (`_coded_bytes`) are appended uncompressed.

    Args:
        error_feedback: True to add what a message loses to the next message.
        seed: seed of the run. Random draws depend only on it, on `worker` and on the step.
        worker: number of the sender, from 0; the receiver need not know it.
        num_workers: number of senders.
    """

    is_sparse: ClassVar[bool] = False
    """True if a message is a few of the values with their indices, in a `SparseCompressor`."""

    def __init__(self, *, error_feedback: bool, seed: int = 0, worker: int = 0, num_workers: int = 1) -> None:
        self._error_feedback = error_feedback
        self._seed, self._worker, self._num_workers = seed, worker, num_workers
        self._templates: list[Tensor] = []
        self._order: list[int] = []
        self._sizes: list[int] = []
        """Elements of each tensor, in the order of the flat vector."""
        self._num_coded = 0
        """Number of tensors that the scheme codes; they come first in the flat vector."""
        self._flat = torch.empty(0)
        """Values that were last compressed; with error feedback, the residual."""
        self._views: list[Tensor] = []
        self._last: Tensor | None = None
        """Last message before `_seal`, for `error_norm`; only without error feedback."""
        self._num_messages = 0

    # -- for callers ---------------------------------------------------------------------------------------------------

    def init(self, templates: Sequence[Tensor]) -> None:
        """Start from scratch, for tensors of these shapes, types and devices; their values are not read.

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
        self._num_messages = 0
        self._start()

    @torch.no_grad()
    def compress(self, tensors: Sequence[Tensor], *, step: int) -> Tensor:
        """Return a message for `tensors` and the residual of earlier messages; keep the residual of this one.

        Args:
            tensors: tensors of the shapes given to `init`, zeros instead of None; they are not changed.
            step: step of the run; the same step draws the same random numbers.

        Returns:
            uint8 [bytes].

        Raises:
            ValueError: the number of tensors or their shapes differ.
        """
        self._take(tensors)
        self._num_messages += 1
        plain = self._pack(self._flat, step)
        if self._error_feedback:
            self._flat -= self._unpack(plain)
        else:
            self._last = plain
        return self._seal(plain)

    @torch.no_grad()
    def decompress(self, message: Tensor) -> list[Tensor]:
        """Return the tensors of a message of any worker, like the templates of `init`.

        Does not read this compressor's state, so one receiver serves all senders.

        Raises:
            ValueError: the message has a wrong length.
        """
        return self._as_templates(self._unpack(self._unseal(message)))

    def state(self) -> dict[str, Tensor]:
        """Return the state between two messages, by name, without copies; empty if there is none."""
        return {"residual": self._flat} if self._error_feedback else {}

    def memory_report(self) -> dict[str, Any]:
        """Return what error feedback has done since `init`; empty without it, and before a message.

        Returns:
            `messages`: their number; `carried`: number of values that the next message begins with; `mean_error`:
            2-norm of the difference between the means of the gradients and of the messages.
        """
        if not (self._error_feedback and self._num_messages):
            return {}
        mean_error = round(float(self._flat.norm()) / self._num_messages, 6)
        return {
            "messages": self._num_messages,
            "carried": int(self._flat.count_nonzero()),
            "mean_error": mean_error,
        }

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Resume from the `state` of a compressor with the same arguments and shapes.

        Raises:
            KeyError: a tensor is missing.
        """
        for name, tensor in self.state().items():
            tensor.copy_(state[name])

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return views of a tensor of `state`, one per template; its length is that of all templates together."""
        tensors: list[Tensor] = [flat] * len(self._order)
        for index, view in zip(self._order, self._split(flat), strict=True):
            tensors[index] = view
        return tensors

    @property
    def dense_bytes(self) -> int:
        """Number of bytes of the uncompressed tensors."""
        return sum(template.numel() * template.element_size() for template in self._templates)

    @property
    def message_bytes(self) -> int | None:
        """Number of bytes of every message; None if it varies."""
        coded = self._fixed_bytes()
        return None if coded is None else coded + self._num_raw_values * self.value_bytes

    @property
    def error_norm(self) -> float:
        """2-norm of what the last message lost; 0 before the first."""
        if self._error_feedback:
            return float(self._flat.norm())
        if self._last is None:
            return 0.0
        return float((self._flat - self._unpack(self._last)).norm())

    @property
    def value_bytes(self) -> int:
        """Bytes of a value in computations and in messages that contain values: 4, or 8 in float64."""
        return self._flat.element_size()

    # -- for schemes to implement --------------------------------------------------------------------------------------

    @abstractmethod
    def _encode(self, flat: Tensor, step: int) -> Tensor:
        """Encode the coded tensors, concatenated in `flat` (sizes: `_coded_sizes`), as uint8 [bytes].

        Must not change `flat`.
        """

    @abstractmethod
    def _decode(self, message: Tensor) -> Tensor:
        """Return a new flat vector of the values that `_encode` encoded."""

    def _coded_bytes(self, shape: torch.Size) -> float:
        """Estimate the bytes that a tensor of this shape adds to a message.

        A tensor that would not become smaller is sent uncompressed.
        """
        return 0

    def _fixed_bytes(self) -> int | None:
        """Return the number of bytes of every result of `_encode`; None if it varies."""
        return None

    def _seal(self, plain: Tensor) -> Tensor:
        """Apply a final lossless coding to a message; the residual is computed without undoing it."""
        return plain

    def _unseal(self, message: Tensor) -> Tensor:
        """Undo `_seal`."""
        return message

    def _start(self) -> None:  # noqa: B027 - most schemes have nothing to do
        """Prepare the scheme's own state, at the end of `init`."""

    # -- for schemes to use --------------------------------------------------------------------------------------------

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
        """Return a generator for this worker's draws in this step, in the same state at every call."""
        seed = np.random.SeedSequence([self._seed % 2**64, self._worker, step]).generate_state(1, np.uint64)
        return torch.Generator(self._flat.device).manual_seed(int(seed[0]))

    def _take(self, tensors: Sequence[Tensor]) -> None:
        """Set `_flat` to the values to send: the tensors plus the residual."""
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
        """Return the tensors in the order of the flat vector."""
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
        """Split a flat vector into views with the shapes of the tensors, in its order."""
        parts = zip(parts_of(flat, self._sizes), self._order, strict=True)
        return [part.view(self._templates[index].shape) for part, index in parts]

    def _as_templates(self, flat: Tensor) -> list[Tensor]:
        """Return the tensors of a flat vector, in the order and with the types of the templates."""
        tensors: list[Tensor] = [flat] * len(self._order)
        for index, view in zip(self._order, self._split(flat), strict=True):
            tensors[index] = view.to(self._templates[index].dtype)
        return tensors


class SparseCompressor(Compressor):
    """Sends a few of the values with their indices.

    Indices refer to the concatenation of all tensors in the order of the templates, so that messages of several workers
    can be merged. A message contains the values (`value_bytes` each, unless a scheme codes them) and the indices as
    `pack_sparse` codes them.
    """

    is_sparse: ClassVar[bool] = True

    @torch.no_grad()
    def compress_sparse(self, tensors: Sequence[Tensor], *, step: int) -> tuple[Tensor, Tensor]:
        """Compress like `compress`, but return indices and values instead of a message.

        Args:
            tensors: same as in `compress`.
            step: same as in `compress`.

        Returns:
            Indices, int64 [values], ascending, and the values there, of the type of the computation.
        """
        self._take(tensors)
        indices = self._select(self._flat, step)
        values = self._values(indices)
        self._sent(indices, values)
        self._num_chosen = indices.numel()
        return indices, values

    def run_report(self) -> dict[str, Any]:
        """Return the number of values that the last message `chose`, and that it chose `of`; empty before one."""
        return {"chose": self._num_chosen, "of": sum(self._sizes)} if self._num_chosen else {}

    @torch.no_grad()
    def compress(self, tensors: Sequence[Tensor], *, step: int) -> Tensor:
        return self.pack_sparse(*self.compress_sparse(tensors, step=step))

    def pack_sparse(self, indices: Tensor, values: Tensor) -> Tensor:
        """Return the message of these values at these ascending indices, sparse or dense, whichever is shorter."""
        return pack(indices, values, self.num_values)

    def unpack_sparse(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Return indices and values of a message of `pack_sparse`; those of a dense one include every index.

        Raises:
            ValueError: the length of the message contradicts its header.
        """
        return unpack(message, self.num_values, self._flat.dtype)

    @property
    def num_values(self) -> int:
        """Number of elements of all tensors."""
        return self._flat.numel()

    @property
    def error_norm(self) -> float:
        return float(self._flat.norm()) if self._error_feedback else self._lost_norm

    @abstractmethod
    def _select(self, flat: Tensor, step: int) -> Tensor:
        """Return the indices to send, int64, ascending."""

    def _values(self, indices: Tensor) -> Tensor:
        """Return the values to send at these indices."""
        return self._flat.index_select(0, indices)

    _lost_norm: float = 0.0
    _num_chosen: int = 0
    """Values of the last message."""

    def _sent(self, indices: Tensor, values: Tensor) -> None:
        """Remove the sent values from `_flat`; the rest is lost, or is the residual."""
        left = self._flat.index_select(0, indices) - values
        # NaN and infinity are sent, because they must not stay in the residual.
        self._flat.index_copy_(0, indices, left.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0))
        if not self._error_feedback:
            self._lost_norm = float(self._flat.norm())

    def _encode(self, flat: Tensor, step: int) -> Tensor:
        indices = self._select(flat, step)
        return self.pack_sparse(indices, flat.index_select(0, indices))

    def _decode(self, message: Tensor) -> Tensor:
        indices, values = self.unpack_sparse(message)
        return self._flat.new_zeros(self.num_values).index_copy_(0, indices, values)
