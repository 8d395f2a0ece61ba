"""A model in parts, of which a process holds only its own: built without memory, cut, and filled from the file.

"GPT-3 with 175B parameters" fits on no machine; its layers are spread as in training, and run forward only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from orchestray.platform.errors import CheckpointError
from orchestray.platform.run.checkpoint_files import MODEL_FILE, FileSum
from orchestray.platform.run.model_files import is_compressed, load_model_json, load_model_tensors
from orchestray.platform.run.store import LocalStore
from orchestray.platform.run.tensor_file import stream
from orchestray.serving.models.quantize import num_bytes
from orchestray.trainers.analysis.flops import flops_of
from orchestray.trainers.analysis.trace import Recorder
from orchestray.trainers.parallel.pipeline.balance import Bounds, balanced, by_names
from orchestray.trainers.parallel.pipeline.cutting import layers_of

if TYPE_CHECKING:
    from orchestray.platform.task import Task
    from orchestray.trainers.parallel.pipeline.layers import Layers

_MOVED = 16.0
"""Number of operations that take as long as reading or writing one element of memory: roughly this on CPUs and GPUs."""
_LAYERS_A_STAGE = 4


@dataclass(frozen=True)
class ServedNetwork:
    """The division of a model that is served: `strategy.network` of its run, forward only."""

    tensor: int = 1
    pipeline: int = 1
    microbatches: int | None = None
    """Number of micro-batches in which a batch passes the stages; None: two per stage."""
    split: str | tuple[str, ...] = "balanced"
    plan: str = "auto"
    memory_limit_bytes: float | None = None
    """Largest size of a stage; None: unlimited."""

    @classmethod
    def from_config(cls, network: Any) -> ServedNetwork:
        """Return the division of `strategy.network`; its data axis is left to the endpoint's replicas."""
        split = network.split if isinstance(network.split, str) else tuple(network.split)
        return cls(network.tensor, network.pipeline, network.microbatches, split, network.plan)

    @property
    def size(self) -> int:
        """Number of processes that hold one copy of the model."""
        return self.tensor * self.pipeline

    @property
    def num_micro_batches(self) -> int:
        return self.microbatches or (2 * self.pipeline if self.pipeline > 1 else 1)


def plain_model(task: Task, *, on_meta: bool = True) -> nn.Module:
    """Build the task's model in evaluation mode: without memory if its state is then complete, else on the CPU.

    Tensors that are not in the model's file (a table computed when the model is built) would be lost without memory.
    """
    if on_meta:
        try:
            with torch.device("meta"), _NothingDrawn():
                model = task.build_model()
        except Exception:  # noqa: BLE001 - a model that reads values while it is built
            model = None
        if model is not None and _is_all_in_its_state(model):
            return model.eval()
    return task.build_model().eval()


class _NothingDrawn(TorchFunctionMode):
    """A mode that does not fill meta tensors with random numbers; torch would import its compiler to do so."""

    _DRAWS = frozenset({Tensor.normal_, Tensor.uniform_, nn.init.trunc_normal_})

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function in self._DRAWS and args and args[0].is_meta:
            return args[0]
        return function(*args, **(kwargs or {}))


def _is_all_in_its_state(model: nn.Module) -> bool:
    buffers = {name for name, _ in model.named_buffers()}
    everything = [*model.parameters(), *model.buffers()]
    return buffers <= set(model.state_dict()) and all(tensor.is_meta for tensor in everything)


def cut(task: Task, model: nn.Module, network: ServedNetwork, example: Any) -> tuple[Layers, Bounds]:
    """Return the model's layers, and the bounds of each stage; every caller gets the same.

    Args:
        task: task, which may list the layers.
        model: result of `plain_model`.
        network: number of stages, and where they begin.
        example: a batch of inputs, for whose shapes costs are counted.

    Raises:
        ConfigError: the model cannot be cut like that.
    """
    named = network.split if isinstance(network.split, tuple) else ()
    wanted = network.pipeline * (_LAYERS_A_STAGE if network.tensor == 1 else 1)
    layers = layers_of(task, model, wanted, named, inputs=example)
    layers.check_count(network.pipeline)
    if named:
        return layers, by_names(layers.names, named, network.pipeline)
    costs = [1.0] * len(layers) if network.split == "equal" else forward_costs(layers, example)
    limit = network.memory_limit_bytes
    parts = range(len(layers)) if limit is not None else range(0)
    memory = [float(num_bytes(layers.part(index, index + 1))) for index in parts] or None
    return layers, balanced(costs, network.pipeline, memory, limit, forbidden=layers.forbidden_cuts)


def forward_costs(layers: Layers, example: Any) -> list[float]:
    """Return the cost of a forward pass through each layer, in operations and elements moved, from the shapes."""
    given = layers.form.tensors(example)
    device = next((tensor.device for tensor in layers.model.state_dict().values()), given[0].device)
    values: tuple[Any, ...] = tuple(tensor.to(device) for tensor in given)
    costs = []
    with torch.no_grad():
        for index in range(len(layers)):
            part = layers.part(index, index + 1)
            with Recorder(has_layers=False) as recorder:
                values = part(*values)
            moved = sum(tensor.numel() for tensor in [*part.parameters(), *_tensors(values)])
            costs.append(flops_of(recorder.graph) + _MOVED * moved)
    return costs


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def file_names(model: nn.Module) -> dict[str, str]:
    """Map each name of the plain model's state to its name in a file: for tied tensors the first name."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in model.state_dict(keep_vars=True).items()}


def fill(module: nn.Module, model_directory: Path, names: Mapping[str, str]) -> None:
    """Load a module's tensors from a trained model's file, with at most one further tensor in memory.

    Args:
        module: the plain model, or a part of it under the plain model's names.
        model_directory: the run's `model`.
        names: `file_names` of the plain model.

    Raises:
        CheckpointError: the file is damaged, or does not fit.
    """
    wanted: dict[str, list[Tensor]] = {}
    for name, held in module.state_dict(keep_vars=True).items():
        wanted.setdefault(names[name], []).append(held)
    filled: dict[int, Tensor] = {}
    for name, tensor in _stored(model_directory):
        for held in wanted.pop(name, ()):
            if tensor.shape != held.shape:
                raise CheckpointError(
                    f"The saved {name} has the shape {list(tensor.shape)}, and the task builds one of "
                    f"{list(held.shape)} now."
                )
            filled[id(held)] = tensor
    if wanted:
        raise CheckpointError(f"The saved weights lack {', '.join(sorted(wanted)[:5])}, which the task builds now.")
    _exchange(module, filled)


def _stored(model_directory: Path) -> Any:
    """Yield names and tensors of the file, whose checksum is verified when all were read.

    A compressed file is small, and read as a whole.
    """
    if is_compressed(model_directory):
        return load_model_tensors(model_directory).items()
    sums = load_model_json(model_directory).get("files", {}).get(MODEL_FILE)
    if not isinstance(sums, dict) or not {"bytes", "crc32"} <= sums.keys():
        raise CheckpointError(f"{model_directory} is damaged: its model.json has no checksum of {MODEL_FILE}")
    store = LocalStore(model_directory.parent)
    if (size := store.size(model_directory.name, MODEL_FILE)) != sums["bytes"]:
        raise CheckpointError(
            f"{model_directory / MODEL_FILE} is damaged: {max(size, 0)} bytes, wanted {sums['bytes']}"
        )
    described, tensors = stream(store, model_directory.name, MODEL_FILE, FileSum(sums["bytes"], sums["crc32"]))
    return zip((str(name) for name, *_ in described), tensors, strict=True)


def _exchange(module: nn.Module, filled: Mapping[int, Tensor]) -> None:
    """Replace placeholders by the tensors that were read for them; shared ones stay shared."""
    made: dict[int, nn.Parameter] = {}
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None and id(parameter) in filled:
                key = id(parameter)
                if key not in made:
                    made[key] = nn.Parameter(filled[key], requires_grad=False)
                each._parameters[name] = made[key]
        for name, buffer in each._buffers.items():
            if buffer is not None and id(buffer) in filled:
                each._buffers[name] = filled[id(buffer)]
