"""The most accurate network that answers in time, by a model of performance (pervasive CNNs: Song et al. 2017).

Networks of growing width are trained on digits. The time of a network is predicted from its counted operations and from
the times of other networks, never from its own. Of those that should keep a deadline, the most accurate one answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from orchestray.trainers.analysis.trace import Recorder
from orchestray.trainers.survey.lab.exhibit import Exhibit
from orchestray.trainers.tasks.digits import Digits

_PROBES = (3, 6, 12, 24, 48, 96)
"""Widths of the networks whose times are measured to fit the model."""
_FAMILY = (4, 8, 16, 32, 64)
"""Widths of the networks to choose from."""
_IMAGES = 32
"""Images of a request."""
_PERCENTILE = 0.95


@dataclass(frozen=True)
class Performance:
    """A model of the time that a network takes: a fixed part, a part for each operation, and the spread above it."""

    fixed_s: float
    operation_s: float
    spread: float
    """Largest 95th percentile of a measured network, over its predicted time."""

    @classmethod
    def fitted(cls, work: Sequence[int], p50_s: Sequence[float], p95_s: Sequence[float]) -> Performance:
        """Fit the line of least relative errors through the medians of networks; neither part is negative."""
        x, y = (torch.tensor(each, dtype=torch.float64) for each in (work, p50_s))
        columns = torch.stack([1 / y, x / y], dim=1)
        fixed, slope = (
            torch.linalg.lstsq(columns, torch.ones(len(y), 1, dtype=torch.float64)).solution.flatten().tolist()
        )
        if slope < 0 or fixed < 0:
            fixed, slope = (float(y.median()), 0.0) if slope < 0 else (0.0, float((y / x).median()))
        spread = max(worst / (fixed + slope * one) for one, worst in zip(work, p95_s, strict=True))
        return cls(fixed, slope, max(1.0, spread))

    def p95_s(self, work: int) -> float:
        """Return the seconds that 95 % of the answers of a network of this work should keep."""
        return self.spread * (self.fixed_s + self.operation_s * work)


def most_accurate_within(
    accuracy: Mapping[Any, float], predicted_s: Mapping[Any, float], deadline_s: float
) -> Any | None:
    """Return the most accurate network whose predicted time keeps the deadline, of equals the quickest; or None.

    Args:
        accuracy: accuracy of each network.
        predicted_s: predicted seconds of each network.
        deadline_s: seconds that an answer may take.
    """
    fitting = [each for each in accuracy if predicted_s[each] <= deadline_s]
    return max(fitting, key=lambda each: (accuracy[each], -predicted_s[each]), default=None)


def deadline(rounds: int = 200, family: Sequence[int] = _FAMILY) -> Exhibit:
    """Choose a network for each of some deadlines, and measure whether 95 % of its answers keep it.

    Args:
        rounds: requests by which a network is measured.
        family: widths of the networks to choose from.
    """
    images, labels = _images("validation")
    request = images[:_IMAGES]
    networks = {width: _network(width, is_trained=width in family) for width in (*family, *_PROBES)}
    work = {width: _work(network, request) for width, network in networks.items()}
    with torch.no_grad():
        probes = {width: _latencies(networks[width], request, rounds) for width in _PROBES}
        model = Performance.fitted(
            [work[width] for width in _PROBES],
            [_quantile(probes[width], 0.5) for width in _PROBES],
            [_quantile(probes[width], _PERCENTILE) for width in _PROBES],
        )
        accuracy = {width: float((networks[width](images).argmax(1) == labels).double().mean()) for width in family}
        predicted_s = {width: model.p95_s(work[width]) for width in family}
        rows: list[list[Any]] = []
        for deadline_s in _deadlines_s(sorted(predicted_s.values())):
            chosen = most_accurate_within(accuracy, predicted_s, deadline_s)
            if chosen is None:
                rows.append([deadline_s * 1e3, None, None, None, None, None])
                continue
            p95_s = _quantile(_latencies(networks[chosen], request, rounds), _PERCENTILE)
            kept = "yes" if p95_s <= deadline_s else "no"
            rows.append([deadline_s * 1e3, chosen, accuracy[chosen], predicted_s[chosen] * 1e3, p95_s * 1e3, kept])
    answered = [row for row in rows if row[1] is not None]
    kept_by = sum(row[-1] == "yes" for row in answered)
    findings = [f"The chosen network keeps {kept_by} of {len(answered)} deadlines in 95 % of its answers."]
    if len(answered) < len(rows):
        findings.append(f"No network keeps {rows[0][0]:.2g} ms.")
    columns = ["deadline, ms", "width chosen", "accuracy", "predicted p95, ms", "measured p95, ms", "kept"]
    return Exhibit(
        "deadline", f"The most accurate network in time, {_IMAGES} digits a request", columns, rows, findings
    )


def _deadlines_s(predicted_s: Sequence[float]) -> list[float]:
    """Return a deadline that none should keep, and one between each predicted time and the next longer one."""
    longer = [*predicted_s[1:], 2 * predicted_s[-1]]
    between = [(one * other) ** 0.5 for one, other in zip(predicted_s, longer, strict=True)]
    return [predicted_s[0] / 2, *between]


def _images(split: str) -> tuple[Tensor, Tensor]:
    task = Digits(hidden=[1], model="cnn")
    batch = task.to_batch(task.dataset(split))
    return batch["inputs"], batch["targets"]


def _network(width: int, *, is_trained: bool) -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(
        *(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * width, 10)),
    )
    if is_trained:
        images, labels = _images("training")
        optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
        for _ in range(4):
            for chosen in torch.split(torch.randperm(len(images)), 64):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(network(images[chosen]), labels[chosen])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    return network.eval()


def _work(network: nn.Module, request: Tensor) -> int:
    with torch.no_grad(), Recorder(has_layers=False) as recorder:
        network(request)
    return recorder.graph.work


def _latencies(network: nn.Module, request: Tensor, rounds: int) -> list[float]:
    answer = partial(network, request)
    answer()
    taken_s = []
    for _ in range(rounds):
        began_s = perf_counter()
        answer()
        taken_s.append(perf_counter() - began_s)
    return taken_s


def _quantile(values: Sequence[float], part: float) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(part))
