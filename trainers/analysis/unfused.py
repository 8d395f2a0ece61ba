"""A look into layers that torch computes by one kernel, which a counter of operations does not see into."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextlib.contextmanager
def unfused() -> Iterator[None]:
    """Switch off the kernels that compute a whole layer at once, those of recurrences and attention, in this process.

    On the `meta` device there are none.
    """
    mkldnn, fast = torch.backends.mkldnn.enabled, torch.backends.mha.get_fastpath_enabled()
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        torch.backends.mkldnn.enabled = mkldnn
        torch.backends.mha.set_fastpath_enabled(fast)
