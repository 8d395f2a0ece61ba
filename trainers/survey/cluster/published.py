"""Published measurements, and what the simulated cluster predicts of them from one point.

GPipe: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (2019), table 2.
BERT: DLPerf of OneFlow (github.com/Oneflow-Inc/DLPerf, NVIDIADeepLearningExamples/PyTorch/BERT), BERT-Base in single
precision with DistributedDataParallel on nodes of 8 V100 and an InfiniBand port of 100 Gbit/s each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from orchestray.platform.comm.allreduce.costs import AlphaBeta
from orchestray.trainers.survey.cluster.allreduce import all_reduce
from orchestray.trainers.survey.cluster.network import Network
from orchestray.trainers.survey.cluster.pipeline import Pipelines

GPIPE_TRANSFORMER: Mapping[int, float] = {2: 1.8, 4: 3.4, 8: 6.3}
"""Throughput with 32 micro-batches on K accelerators, in that of two accelerators with one micro-batch."""
_GPIPE_MICRO_BATCHES = 32

BERT_SAMPLES_PER_S: Mapping[int, Mapping[int, float]] = {
    32: {1: 119.6, 4: 457.72, 8: 921.32, 16: 1499.4, 32: 2885.81},
    48: {1: 121.94, 4: 464.66, 8: 928.01, 16: 1584.32, 32: 3039.3},
}
"""Samples a second by samples a GPU and step, and by GPUs."""
BERT_BYTES = 110_000_000 * 4
"""Bytes of the gradients of BERT-Base, about 110 million parameters in single precision."""
_GPUS_PER_NODE = 8


def gpipe_speedups(calibrated: int = 2) -> dict[int, float]:
    """Predict `GPIPE_TRANSFORMER` from one of its points.

    What the point calibrates is the rate of computation on a micro-batch, in that on the whole batch.

    Args:
        calibrated: the K of the point.
    """

    def ideal(num_workers: int, num_micro_batches: int) -> float:
        whole_s = np.full((1, num_workers), 1 / num_workers)
        return 1 / float(Pipelines("gpipe", num_workers, num_micro_batches).step_s(whole_s).max())

    unit = ideal(2, 1)
    found = {size: ideal(size, _GPIPE_MICRO_BATCHES) / unit for size in GPIPE_TRANSFORMER}
    rate = GPIPE_TRANSFORMER[calibrated] / found[calibrated]
    return {size: rate * speedup for size, speedup in found.items()}


@dataclass(frozen=True)
class Scaling:
    """A table of measured and predicted samples a second, by GPUs."""

    measured: Mapping[int, float]
    predicted: Mapping[int, float]

    @property
    def errors(self) -> dict[int, float]:
        """Relative errors."""
        return {size: self.predicted[size] / self.measured[size] - 1 for size in self.measured}


def bert_scaling(samples: int, calibrated: int = 16, calibrated_samples: int = 32) -> Scaling:
    """Predict a row of GPUs of `BERT_SAMPLES_PER_S` from the speed of one GPU and from one point.

    The point gives the bandwidth between nodes, as the part of the all-reduce that computation does not hide. Links
    within a node count as free.

    Args:
        samples: samples a GPU and step, of the table to predict.
        calibrated: GPUs of the point, more than a node has.
        calibrated_samples: samples a GPU and step of the point.
    """

    def exposed_s(size: int, beta_s_per_byte: float) -> float:
        network = Network(size, AlphaBeta(0.0, 0.0), AlphaBeta(0.0, beta_s_per_byte), _GPUS_PER_NODE)
        return float(all_reduce("ring", network, BERT_BYTES).after(np.zeros(size)).max())

    def step_s(size: int, each: int) -> float:
        return size * each / BERT_SAMPLES_PER_S[each][size]

    beyond_s = step_s(calibrated, calibrated_samples) - step_s(1, calibrated_samples)
    beta_s_per_byte = beyond_s / exposed_s(calibrated, 1.0)
    measured = BERT_SAMPLES_PER_S[samples]
    predicted = {size: size * samples / (step_s(1, samples) + exposed_s(size, beta_s_per_byte)) for size in measured}
    return Scaling(measured, predicted)
