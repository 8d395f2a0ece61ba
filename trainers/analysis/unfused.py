"""A look into layers that torch computes by one kernel, which a counter of operations does not see into."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

_FUSED = {
    **dict.fromkeys(("scaled_dot_product_attention", "multi_head_attention_forward"), "attention"),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), "recurrences"),
}
"""Functions of torch that kernels compute at once, each with the kind of its layers."""


class FusedCalls(TorchFunctionMode):
    """A mode that notes the kinds of layers which a kernel would compute at once.

    Attributes:
        kinds: the kinds that were called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if (kind := _FUSED.get(getattr(func, "__name__", ""))) is not None:
            self.kinds.add(kind)
        return func(*args, **(kwargs or {}))


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
