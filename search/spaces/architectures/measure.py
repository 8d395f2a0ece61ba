"""The cost of a network: its parameters, the operations per sample, and its latency on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from orchestray.platform.data.nested import map_tensors
from orchestray.platform.process import torch_threads
from orchestray.trainers.core.inputs import arguments
from orchestray.trainers.core.modes import evaluating

_WARM_UP = 3
_META = torch.device("meta")


@dataclass(frozen=True)
class Flops:
    """The floating point operations of a forward pass, as far as they can be counted."""

    counted: int
    """Number of operations of convolutions and products of matrices; a multiplication and an addition count as two."""
    uncounted: tuple[str, ...] = ()
    """Names of the costly operations that have no formula, so that the number is too small."""


@dataclass(frozen=True)
class Measures:
    """The measured costs of one network."""

    parameters: int
    """Number of trainable parameters."""
    flops: Flops
    """Operations of one sample's forward pass."""
    latency_ms: float
    """Median latency of warm forward passes of one sample, with one thread."""


def measure(network: nn.Module, inputs: Any, *, passes: int = 15) -> Measures:
    """Measure a network in evaluation mode; its own mode is restored afterwards.

    Args:
        network: any module.
        inputs: its inputs for one sample, as a task makes them: a tensor, or several in a tuple or a mapping.
        passes: number of timed forward passes, after warm-up.
    """
    tensors = [*network.parameters(), *network.buffers()]
    device = tensors[0].device if tensors else torch.device("cpu")
    dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
    args, kwargs = map_tensors(
        lambda one: one.to(device, dtype if one.is_floating_point() else None), arguments(inputs)
    )
    with evaluating(network), torch_threads.using(1), torch.no_grad():
        return Measures(
            parameters=num_parameters(network),
            flops=flops(network, *args, **kwargs),
            latency_ms=_latency_ms(network, args, kwargs, passes),
        )


def num_parameters(network: nn.Module) -> int:
    """Return the number of trainable parameters; a tensor shared under two names counts once."""
    return sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)


def flops(network: nn.Module, *args: Any, **kwargs: Any) -> Flops:
    """Return the operations of a forward pass.

    They are counted on the `meta` device, which computes nothing and takes a fused layer apart into products. A network
    that needs values (`.item()`) is run where it is, with those fused kernels off that no counter sees into.

    Args:
        network: any module.
        args: its inputs.
        kwargs: its named inputs.
    """
    state = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    on_meta = {name: torch.empty_like(tensor, device=_META) for name, tensor in state.items()}
    with contextlib.suppress(Exception):  # of any kind: the network's own code
        moved = map_tensors(lambda one: one.to(_META), (args, kwargs))
        return _counted(lambda: torch.func.functional_call(network, on_meta, *moved))
    with _unfused():
        return _counted(lambda: network(*args, **kwargs))


def _counted(forward: Callable[[], Any]) -> Flops:
    counter = FlopCounterMode(display=False, custom_mapping=dict(_FORMULAS))
    with torch.no_grad(), _Uncounted(counter.flop_registry) as uncounted, counter:
        forward()
    return Flops(int(counter.get_total_flops()), tuple(sorted(uncounted.names)))


@contextlib.contextmanager
def _unfused() -> Iterator[None]:
    """Switch off the kernels that compute a whole layer at once: recurrences, attention."""
    mkldnn, fast = torch.backends.mkldnn.enabled, torch.backends.mha.get_fastpath_enabled()
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        torch.backends.mkldnn.enabled = mkldnn
        torch.backends.mha.set_fastpath_enabled(fast)


_COSTLY = (
    *("linalg_", "_linalg_", "_fft_", "_cdist", "_pdist", "_trilinear", "cholesky", "lu_", "triangular_solve"),
    *("mkldnn_", "_cudnn_rnn", "miopen_rnn", "_scaled_", "_native_multi_head", "_transformer_encoder", "_flash_"),
    *("_efficient_", "_int_mm", "_weight_int", "_grouped_mm", "_sparse", "sparse_", "quantize", "fbgemm"),
)
"""Beginnings of the names of torch's operations that cost as much as products, beside those with a formula."""


class _Uncounted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A look at the operations below a counter: it collects the names of costly ones without a formula."""

    def __init__(self, formulas: Mapping[Any, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._formulas = formulas
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        packet = func.overloadpacket
        namespace, _, name = str(packet).partition(".")
        is_dense = all(not isinstance(one, Tensor) or one.layout == torch.strided for one in args)
        is_known = packet in self._formulas and is_dense
        if not is_known and (namespace not in ("aten", "prims", "prim") or name.startswith(_COSTLY) or not is_dense):
            self.names.add(str(packet) if is_dense else f"{packet} of sparse tensors")
        return func(*args, **(kwargs or {}))


def _of_vector(matrix: Sequence[int], *_: Any, **__: Any) -> int:
    """Return the operations of a matrix, or a vector, times a vector."""
    return 2 * int(torch.Size(matrix).numel())


def _added(_vector: Sequence[int], matrix: Sequence[int], *_: Any, **__: Any) -> int:
    return _of_vector(matrix)


_aten = torch.ops.aten
_FORMULAS: Mapping[Any, Any] = {
    _aten.mv: _of_vector,
    _aten.dot: _of_vector,
    _aten.vdot: _of_vector,
    _aten.addmv: _added,
}
"""Operations that `torch.utils.flop_counter` has no formula for."""


def _latency_ms(network: nn.Module, args: Any, kwargs: Any, passes: int) -> float:
    is_on_gpu = any(parameter.is_cuda for parameter in network.parameters())
    taken_ms = []
    for number in range(_WARM_UP + passes):
        begin = perf_counter()
        network(*args, **kwargs)
        if is_on_gpu:
            torch.cuda.synchronize()
        if number >= _WARM_UP:
            taken_ms.append((perf_counter() - begin) * 1e3)
    return median(taken_ms)
