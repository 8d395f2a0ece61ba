"""Differences between the results of runs: trained weights by tensor, losses by step. Imports torch late."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import RunNameError
from orchestray.platform.run.directory import RunPaths
from orchestray.platform.run.metrics import read_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from orchestray.trainers.saved.run import Run


@dataclass
class WeightsDifference:
    """The difference between the trained weights of a run and the reference's."""

    max_difference: float | None = None
    """Largest absolute difference of two corresponding elements, in float64; None if no tensor could be compared.

    Infinite if one element is NaN and the other is not.
    """
    tensor: str | None = None
    """Tensor with the largest difference; None if nothing differs."""
    num_compared: int = 0
    """Number of tensors that both have, with the same shape."""
    missing: list[str] = field(default_factory=list)
    """Tensors that only the reference has."""
    unexpected: list[str] = field(default_factory=list)
    """Tensors that only the run has."""
    shapes: dict[str, list[list[int]]] = field(default_factory=dict)
    """Tensors of different shapes: the reference's shape and the run's."""
    dtypes: dict[str, list[str]] = field(default_factory=dict)
    """Tensors of different dtypes: the reference's dtype and the run's."""
    same_bits: bool = False


@dataclass
class LossesDifference:
    """The difference between the losses of the training steps of a run and the reference's."""

    max_difference: float | None = None
    """Largest absolute difference of two losses of a step; infinite if one is NaN; None without common steps."""
    step: int | None = None
    """Step with the largest difference; None if nothing differs."""
    num_compared: int = 0
    """Number of steps that both have."""
    num_only_in_one: int = 0
    """Number of steps that only one of them has."""
    same_bits: bool = False


@dataclass
class Comparison:
    """A run compared with the reference."""

    name: str
    weights: WeightsDifference
    losses: LossesDifference

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, except that a difference may be infinite."""
        return asdict(self)


def compare_runs(reference: Run, others: Sequence[Run]) -> Iterator[Comparison]:
    """Compare each of `others` with `reference`, one after the other.

    Raises:
        RunNameError: a run has no trained model; before anything is compared.
        CheckpointError: a model is damaged.
    """
    from orchestray.platform.run.model_files import load_model_tensors

    for run in (reference, *others):
        if not (RunPaths(run.path).model / "model.json").is_file():
            raise RunNameError(
                f"the run {run.name} ({run.status}) has no trained model to compare: a run writes model/ at its end; "
                f"go on with it by `orchestray train CONFIG --name {run.name} --resume`"
            )
    weights, losses = load_model_tensors(RunPaths(reference.path).model), losses_of(reference)
    for run in others:
        yield Comparison(
            run.name,
            compare_tensors(weights, load_model_tensors(RunPaths(run.path).model)),
            compare_losses(losses, losses_of(run)),
        )


def losses_of(run: Run) -> dict[int, float]:
    """Return the loss of each training step; NaN if the line has none."""
    lines = read_lines(RunPaths(run.path).metrics)
    losses = {int(line["step"]): line.get("loss") for line in lines if "split" not in line and "step" in line}
    return {step: math.nan if loss is None else float(loss) for step, loss in losses.items()}


def compare_tensors(reference: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> WeightsDifference:
    """Compare tensors of the same names."""
    import torch

    found = WeightsDifference(
        missing=[name for name in reference if name not in tensors],
        unexpected=[name for name in tensors if name not in reference],
    )
    same_bits = not found.missing and not found.unexpected
    for name in (name for name in reference if name in tensors):
        wanted, got = reference[name], tensors[name]
        if wanted.dtype != got.dtype:
            found.dtypes[name] = [str(tensor.dtype).removeprefix("torch.") for tensor in (wanted, got)]
        if wanted.shape != got.shape:
            found.shapes[name] = [list(wanted.shape), list(got.shape)]
            continue
        found.num_compared += 1
        is_same = wanted.dtype == got.dtype and torch.equal(_as_bytes(wanted), _as_bytes(got))
        same_bits = same_bits and is_same
        difference = 0.0 if is_same else _largest_difference(wanted, got)
        if found.max_difference is None or difference > found.max_difference:
            found.max_difference, found.tensor = difference, name if difference > 0 else None
    found.same_bits = same_bits and not found.shapes
    return found


def compare_losses(reference: Mapping[int, float], losses: Mapping[int, float]) -> LossesDifference:
    """Compare losses by step."""
    found = LossesDifference(num_only_in_one=len(reference.keys() ^ losses.keys()))
    for step in sorted(reference.keys() & losses.keys()):
        found.num_compared += 1
        difference = _difference(reference[step], losses[step])
        if found.max_difference is None or difference > found.max_difference:
            found.max_difference, found.step = difference, step if difference > 0 else None
    found.same_bits = found.max_difference == 0.0 and not found.num_only_in_one
    return found


def _difference(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    difference = abs(a - b)
    return math.inf if math.isnan(difference) else difference


def _largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    import torch

    if not a.numel():
        return 0.0
    a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (a, b))
    if a.shape != b.shape:  # one is complex and the other is not
        return math.inf
    a, b = a.to(torch.float64), b.to(torch.float64)
    is_same = (a == b) | (a.isnan() & b.isnan())
    difference = (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return float(difference.masked_fill(is_same, 0.0).max())


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)
