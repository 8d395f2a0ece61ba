"""The parts of `torch.distributed.fsdp.fully_shard` (FSDP2) that `FullySharded` uses, and those that it replaces.

FSDP2 stores a module's parameters as shards. Its hooks gather them before use and free them afterwards, and pass each
unit's gradients to a reduce-scatter. Here its communication uses custom hooks over our own `Collective`, because:

- gloo's reduce-scatter sends as much as an all-reduce does (see reduce_scatter.py);
- the bytes are counted where they are sent;
- a lost peer is a `PeerLostError`, and no second reference keeps the group's connections open, as a device mesh over
  `torch.distributed`'s own groups would;
- replicas may run different numbers of passes (uneven_calls.py).

So FSDP2's mesh needs no process group at all, and works in threads.

The version of torch is pinned. This relies on parts without a public name: `FSDPModule._get_fsdp_state()`, its
`_pre_backward` and its parameter groups (`fsdp_params` in the order of communication, each with its `sharded_param`,
`padded_sharded_param_size`, `_sharded_param_data`, `_module_info` and `_param_fqn`). It also relies on gradients
becoming views of the reduce-scatter's output, which nothing reads before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from orchestray.platform.comm.collective import Collective
from orchestray.platform.errors import TrainingError
from orchestray.trainers.core.every_tensor import every_tensor_in
from orchestray.trainers.core.forward import thawed
from orchestray.trainers.optim.sparse import dense, is_sparse

if TYPE_CHECKING:
    from orchestray.trainers.sync.zero.reduce_scatter import AllGather, ReduceScatter


Hooks: TypeAlias = "dict[tuple[nn.Module, str], list[tuple[Callable[..., Any], Any]]]"
"""By a module and the name of its parameter: how each hook on its gradient is registered, and the hook."""


class Comms(NamedTuple):
    """The communication of a unit; FSDP2 calls it with the unit's number, on all
    ranks by the rules of uneven_calls.py.
    """

    gather: Callable[[int, Tensor], AllGather]
    """Starts to fill a tensor `[ranks x numel]`, of which this rank's part is there already."""
    reduce: Callable[[int, Tensor, Tensor], ReduceScatter]
    """Starts to sum a tensor `[ranks x numel]`; this rank's part of the sum goes into one of `[numel]`."""


class Shard(NamedTuple):
    """One parameter of a unit."""

    parameter: Tensor
    """Parameter as the model holds it between steps: a DTensor."""
    local: Tensor
    """Rows of this rank; their memory stays the same."""
    padded: Tensor
    """Flat view of the same memory, with the padding that makes all ranks' parts one size."""


class Unit:
    """Parameters that are gathered together, and whose gradients are reduced together."""

    def __init__(self, module: nn.Module, number: int, hooks: Hooks) -> None:
        self.module = module
        self.number = number
        self._hooks = hooks
        (self._group,) = cast(Any, module)._get_fsdp_state()._fsdp_param_groups
        self.shards = [
            Shard(p.sharded_param, p.sharded_param._local_tensor, p._sharded_param_data)
            for p in self._group.fsdp_params
        ]

    @property
    def trained(self) -> list[Shard]:
        return [shard for shard in self.shards if shard.parameter.requires_grad]

    def input(self, size: int) -> Tensor:
        """Return a tensor to gather into, with this rank's part filled as FSDP2 fills it."""
        kinds = {shard.padded.dtype for shard in self.shards}
        kind = kinds.pop() if len(kinds) == 1 else torch.uint8
        flat = torch.cat([shard.padded.view(kind) for shard in self.shards])
        whole = flat.new_empty(size * flat.numel())
        whole.view(size, -1)[cast(Any, self._group).mesh_info.shard_mesh_rank] = flat
        return whole

    def reduced(self, part: Tensor) -> list[Tensor]:
        """Return this rank's rows of each trained parameter's gradient: views of the result of a reduce-scatter."""
        views, start = [], 0
        for shard in self.trained:
            views.append(part[start : start + shard.local.numel()].view(shard.local.shape))
            start += shard.padded.numel()
        return views

    def num_reduced(self) -> int:
        """Return the number of elements of this rank's part of a reduce-scatter, with padding."""
        return sum(shard.padded.numel() for shard in self.trained)

    def watch(self, used: Callable[[Tensor], None]) -> None:
        """Call `used(parameter)` for each trained parameter that gets a gradient in a backward pass."""

        def hook_gathered(*_: object) -> None:
            handle.remove()
            for fsdp_param in self._group.fsdp_params:
                if fsdp_param.sharded_param.requires_grad:
                    owner = fsdp_param.sharded_param

                    def note(gathered: Tensor, owner: Tensor = owner) -> None:
                        if gathered.grad is not None and is_sparse(gathered.grad):
                            gathered.grad = dense(gathered.grad)
                        used(owner)

                    info = fsdp_param._module_info
                    for register, hook in self._hooks.get((info.module, info.param_name), ()):
                        register(fsdp_param.unsharded_param, hook)
                    fsdp_param.unsharded_param.register_post_accumulate_grad_hook(note)

        # FSDP2's own hook, which runs before this one, makes the gathered parameter; it stays the same object.
        handle = self.module.register_forward_pre_hook(hook_gathered)
        if len(self.trained) < len(self.shards):
            self.module.register_forward_hook(self._refuse_thawed)

    def _refuse_thawed(self, *_: object) -> None:
        """Refuse a frozen parameter that the forward pass lets be trained: FSDP2 would freeze it again, silently."""
        for fsdp_param in self._group.fsdp_params:
            if fsdp_param.unsharded_param.requires_grad and not fsdp_param.sharded_param.requires_grad:
                raise thawed(fsdp_param._param_fqn)

    def clear(self) -> None:
        """Drop every gradient and every pending all-gather."""
        for fsdp_param in self._group.fsdp_params:
            fsdp_param.sharded_param.grad = None
            fsdp_param.unsharded_accumulated_grad = None
            if "_unsharded_param" in vars(fsdp_param):
                fsdp_param.unsharded_param.grad = None
        self._group._all_gather_result = None

    @property
    def is_gathering(self) -> bool:
        """True if its parameters are being gathered, or are gathered and not used yet."""
        return self._group._all_gather_result is not None

    def settle(self) -> None:
        """Wait for an all-gather that the model did not use; in the next pass its values would be stale."""
        if (pending := self._group._all_gather_result) is not None:
            if pending.all_gather_work is not None:
                pending.all_gather_work.wait()
            self._group._all_gather_result = None


def shard(
    model: nn.Module, units: Sequence[nn.Module], ignored: set[nn.Parameter], collective: Collective, comms: Comms
) -> list[Unit]:
    """Shard the model in place; the parameters that are in none of the modules `units` form one more unit.

    Args:
        model: the root module.
        units: modules within it, none within another.
        ignored: parameters that stay unsharded.
        collective: the ranks to shard over.
        comms: the communication functions.

    Raises:
        TrainingError: a unit trains parameters of several dtypes.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = _mesh(collective, next(model.parameters()).device)
    hooks = _gradient_hooks(model)
    made: list[Unit] = []
    for module in [*units, model]:
        _check(module, ignored)
        module.register_forward_hook(_without_views)  # before FSDP2's own
        # Resharding the root too after its forward pass makes the bytes sent three times those of the parameters.
        fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=ignored)
        module.register_forward_hook(_reach_hidden)
        wrapped = cast(FSDPModule, module)
        # Losses are weighted by samples already: gradients are summed, not averaged.
        wrapped.set_gradient_divide_factor(1.0)
        wrapped.set_force_sum_reduction_for_comms(True)
        wrapped.set_reduce_scatter_unused_params(True, recurse=False)
        wrapped.set_custom_all_gather(_all_gather(len(made), comms))
        wrapped.set_custom_reduce_scatter(_reduce_scatter(len(made), comms))
        if wrapped._get_fsdp_state()._fsdp_param_groups:
            made.append(Unit(module, len(made), hooks))
    cast(FSDPModule, model)._set_unshard_async_op(True)
    return made


def _without_views(_module: nn.Module, _inputs: Any, outputs: Any) -> Any:
    """Return copies of outputs that are views: changed in place later, they would lose FSDP2's hook, which gathers."""
    if not any(map(_is_lost, pytree.tree_leaves(outputs))):
        return outputs
    return pytree.tree_map(lambda each: each.clone() if _is_lost(each) else each, outputs)


def _reach_hidden(module: nn.Module, _inputs: Any, outputs: Any) -> None:
    """Have the parameters gathered for the backward pass that begins at a tensor in an object unknown to pytrees."""
    if isinstance(outputs, Tensor) or not torch.is_grad_enabled() or is_backward():
        return
    known = {id(leaf) for leaf in pytree.tree_leaves(outputs)}
    for tensor in every_tensor_in(outputs):
        if tensor.requires_grad and id(tensor) not in known:
            cast(Any, tensor).register_hook(cast(Any, module)._get_fsdp_state()._pre_backward)


def _is_lost(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value._is_view()


def _gradient_hooks(model: nn.Module) -> Hooks:
    """Return the hooks that the user has put on the parameters' gradients; FSDP2 gathers into other tensors."""
    found: Hooks = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                each, added_up = parameter._backward_hooks or {}, cast(Any, parameter)._post_accumulate_grad_hooks or {}
                found[module, name] = [
                    *((Tensor.register_hook, hook) for hook in each.values()),
                    *((Tensor.register_post_accumulate_grad_hook, hook) for hook in added_up.values()),
                ]
    return found


def prefetch(order: Sequence[Unit]) -> None:
    """Make each of these units start to gather the next one's parameters when it has its own, in forward passes."""
    for unit, following in pairwise(order):
        cast(Any, unit.module).set_modules_to_forward_prefetch([following.module])


def is_backward() -> bool:
    """Return True if this thread is within a backward pass."""
    return torch._C._current_graph_task_id() != -1


def set_gradient_sync(model: nn.Module, *, sync: bool) -> None:
    """Set whether the next backward passes reduce their gradients, or add them to whole ones on this rank."""
    cast(Any, model).set_requires_gradient_sync(sync)


def reset(model: nn.Module) -> None:
    """Shard everything again after a forward or backward pass that failed."""
    wrapped = cast(Any, model)
    if wrapped._get_fsdp_state()._is_root:  # a pass has begun
        wrapped.reset_iter_state()


def _check(module: nn.Module, ignored: set[nn.Parameter]) -> None:
    from torch.distributed.tensor import DTensor

    kinds: dict[torch.dtype, str] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter not in ignored and not isinstance(parameter, DTensor):
            kinds.setdefault(parameter.dtype, name)
    if len(kinds) > 1:
        named = " and ".join(f"{name!r} in {str(kind).removeprefix('torch.')}" for kind, name in kinds.items())
        raise TrainingError(
            f"With strategy.exchange.shard: parameters, what one {type(module).__name__} trains must be of one dtype; "
            f"it has {named}. Convert the model to one, or shard the gradients only."
        )


def _mesh(collective: Collective, device: torch.device) -> Any:
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.device_mesh import DeviceMesh

    class Mesh(DeviceMesh):
        """A mesh that only lists the ranks; nothing is sent over it."""

        def __init__(self) -> None:
            ranks = torch.arange(collective.size)
            super().__init__(device.type, ranks, _init_backend=False, _rank=collective.rank)
            self._unconnected = dist.ProcessGroup(HashStore(), collective.rank, collective.size)

        def get_group(self, mesh_dim: int | str | None = None) -> dist.ProcessGroup:
            return self._unconnected

    return Mesh()


def _all_gather(number: int, comms: Comms) -> Any:
    from torch.distributed.distributed_c10d import Work
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as Interface

    class Gathering(Work):
        def __init__(self, gather: AllGather) -> None:
            super().__init__()
            self._gather = gather

        def wait(self, timeout: Any = None) -> bool:
            self._gather.wait()
            return True

    class Gather(Interface):
        def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
        ) -> Work | None:
            gathering = Gathering(comms.gather(number, output_tensor))  # the input is a part of the output
            if async_op:
                return gathering
            gathering.wait()
            return None

    return Gather()


def _reduce_scatter(number: int, comms: Comms) -> Any:
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as Interface

    class Reduce(Interface):
        def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
        ) -> None:
            comms.reduce(number, input_tensor, output_tensor)  # waited for before the gradients are used

    return Reduce()
