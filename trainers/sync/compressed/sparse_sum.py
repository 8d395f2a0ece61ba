"""The sum of sparse vectors: pairs of index and value instead of whole vectors.

Renggli, Ashkboos, Aghagolzadeh, Alistarh and Hoefler, "SparCML: High-Performance Sparse Communication for Machine
Learning" (SC 2019), section 5: recursive doubling that merges the pairs of two sides (SSAR_Recursive_double), or
everybody gets everybody's pairs. A message turns dense exactly when that is shorter, at any point on the way.

As in Kylix (nested_butterfly.py), replicas whose indices stay the same send only values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from orchestray.platform.comm.collective import Collective
from orchestray.trainers.compression.base import SparseCompressor, as_bytes, from_bytes
from orchestray.trainers.compression.sparse import HEADER_BYTES, pack, unpack
from orchestray.trainers.sync.common.messages import message_of, trade

Way = Literal["auto", "gather", "doubling"]


@dataclass
class _Merge:
    """The indices of two sides merged into one list."""

    mine: Tensor
    """Positions of this side's indices in the merged ones."""
    theirs: Tensor
    merged: Tensor
    """Union of the indices, ascending."""


class SparseSum:
    """A sum of sparse vectors of one length over the replicas, with the same bits on each.

    Args:
        collective: the replicas.
        num_values: length of the vectors.
        dtype: type of their values.
        way: `gather`: each rank sends its pairs to all others, which add them up in rank order. `doubling`: in each of
            log2 P rounds, pairs of ranks merge what they have. `auto`: doubling if the number of ranks is a power of
            two: it never sends more than gathering, and less where indices coincide. Otherwise gathering: to hand in
            the pairs of ranks beyond a power of two, and the sum back, would cost more than doubling saves.
        coder: codes the vectors that everybody sends to everybody, in the form of its own; None: values as they are.

    Raises:
        ValueError: doubling is asked for, and the number of ranks is not a power of two.
    """

    def __init__(
        self,
        collective: Collective,
        num_values: int,
        dtype: torch.dtype,
        way: Way = "auto",
        coder: SparseCompressor | None = None,
    ) -> None:
        self._collective = collective
        self._coder = coder
        self._num_values = num_values
        self._dtype = dtype
        self._dense_bytes = HEADER_BYTES + num_values * dtype.itemsize
        is_power = collective.size & (collective.size - 1) == 0
        if way == "doubling" and not is_power:
            raise ValueError(f"recursive doubling needs a power of two of ranks, got {collective.size}")
        self.way = way if way != "auto" else "doubling" if is_power and collective.size > 2 else "gather"
        self._indices: Tensor | None = None
        """Indices of this rank's last vector, as the others know them; None: they do not."""
        self._all_indices: list[Tensor] = []
        """Indices of every rank's last vector, by rank, if all were gathered."""
        self._merges: list[_Merge] = []
        """Merges of the last vectors, in order, with recursive doubling."""
        self._next_merge = 0
        self._repeats = False
        self._num_repeats = 0
        """Number of sums for which this rank's indices were those of the sum before."""

    def run_report(self) -> dict[str, Any]:
        """Return the `way` of the sums, and how many were of unchanged indices, `repeats`; empty before a sum."""
        return {} if not (self._all_indices or self._merges) else {"way": self.way, "repeats": self._num_repeats}

    def all_reduce(self, indices: Tensor, values: Tensor) -> Tensor:
        """Return the sum of every rank's vector.

        Args:
            indices: indices of this rank's values, ascending, int64 `[n]`.
            values: values, `[n]`.

        Returns:
            The dense sum, `[num_values]`.

        Raises:
            PeerLostError: another replica is gone.
        """
        if self._collective.size == 1:
            return self._dense(indices, values)
        repeats = self._indices is not None and torch.equal(indices, self._indices)
        self._num_repeats += repeats
        message = as_bytes(values.contiguous()) if repeats else self._coded(indices, values)
        headers = self._collective.all_gather(torch.tensor([message.numel(), int(repeats)]))
        if self.way == "gather":
            total = self._gathered(message, headers)
            self._indices = self._all_indices[self._collective.rank]
            return total
        self._indices = indices
        self._repeats = bool(headers[:, 1].all())
        return self._doubled(indices, values)

    def _gathered(self, message: Tensor, headers: Tensor) -> Tensor:
        collective = self._collective
        sizes = headers[:, 0].tolist()
        received = trade([message] * collective.size, sizes, collective)
        before, self._all_indices = self._all_indices, []
        total = torch.zeros(self._num_values, dtype=self._dtype, device=message.device)
        for rank, (arrived, repeats) in enumerate(zip(received, headers[:, 1].tolist(), strict=True)):
            if repeats:
                indices, values = before[rank], from_bytes(arrived, self._dtype)
            else:
                indices, values = self._decoded(arrived)
            self._all_indices.append(indices)
            total.index_add_(0, indices, values)
        return total

    def _coded(self, indices: Tensor, values: Tensor) -> Tensor:
        if self._coder is None or self.way != "gather":  # sums of several vectors have other values
            return pack(indices, values, self._num_values)
        return self._coder.pack_sparse(indices, values)

    def _decoded(self, message: Tensor) -> tuple[Tensor, Tensor]:
        if self._coder is None:
            return unpack(message, self._num_values, self._dtype)
        return self._coder.unpack_sparse(message)

    # -- recursive doubling --------------------------------------------------------------------------------------------

    def _doubled(self, indices: Tensor, values: Tensor) -> Tensor:
        if not self._repeats:
            self._merges = []
        self._next_merge = 0
        distance = 1
        while distance < self._collective.size:
            theirs = self._swap(self._collective.rank ^ distance, indices, values)
            indices, values = self._merged(indices, values, *theirs)
            distance *= 2
        return self._dense(indices, values)

    def _known(self) -> _Merge | None:
        """Return the last step's merge of the next two lists, if all ranks' indices are unchanged."""
        return self._merges[self._next_merge] if self._repeats else None

    def _merged(self, mine: Tensor, my_values: Tensor, theirs: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        merge = self._known()
        if merge is None:
            merged = torch.cat([mine, theirs]).unique()  # type: ignore[no-untyped-call]
            merge = _Merge(torch.searchsorted(merged, mine), torch.searchsorted(merged, theirs), merged)
            self._merges.append(merge)
        self._next_merge += 1
        total = torch.zeros(merge.merged.numel(), dtype=self._dtype, device=values.device)
        total[merge.mine] = my_values
        total[merge.theirs] += values  # a + b has the same bits as b + a, so both sides get the same sum
        return merge.merged, total

    def _message(self, indices: Tensor, values: Tensor) -> Tensor:
        if self._repeats:
            return as_bytes(values.contiguous())
        return pack(indices, values, self._num_values)

    def _read(self, message: Tensor, merge: _Merge | None) -> tuple[Tensor, Tensor]:
        if merge is None:
            return unpack(message, self._num_values, self._dtype)
        return merge.merged[merge.theirs], from_bytes(message, self._dtype)

    def _swap(self, peer: int, indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        message, known = self._message(indices, values), self._known()
        if known is not None:  # both lengths are known
            arrived = message_of(known.theirs.numel() * self._dtype.itemsize, message.device)
        else:
            size = torch.empty(1, dtype=torch.int64)
            mine = torch.tensor([message.numel()])
            self._collective.start_exchange({peer: mine}, {peer: size}).wait()
            arrived = message_of(int(size), message.device)
        self._collective.start_exchange({peer: message}, {peer: arrived}).wait()
        if known is None and message.numel() == self._dense_bytes and indices.numel() < self._num_values:
            self._indices = None  # a dense message does not say which values were chosen
        return self._read(arrived, known)

    def _dense(self, indices: Tensor, values: Tensor) -> Tensor:
        return torch.zeros(self._num_values, dtype=self._dtype, device=values.device).index_copy_(
            0, indices, values.to(self._dtype)
        )
