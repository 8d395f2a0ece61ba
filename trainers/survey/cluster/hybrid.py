"""AlexNet on several GPUs in the alpha-beta model: by data or by model parallelism alone, and by a hybrid of both.

Under data parallelism the samples are divided, and all gradients are summed. Under model parallelism the channels and
neurons of every layer are divided, and its inputs are exchanged. In the hybrid scheme the convolutions are
data-parallel, and the fully connected layers are split over the GPUs. See Krizhevsky, "One weird trick for
parallelizing convolutional neural networks" (2014). Ben-Nun and Hoefler (2019) name speed-ups on 4 GPUs: at best 2.2 by
one scheme alone, and 3.1 by the hybrid in another implementation. The constants here are the sizes of the network and
the first of the two, as that of data parallelism. Those of model parallelism and of the hybrid are predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestray.platform.comm.allreduce.costs import AlphaBeta, cost_s

FLOAT_BYTES = 4
CONV_INPUTS = (64 * 27 * 27, 192 * 13 * 13, 384 * 13 * 13, 256 * 13 * 13)
"""Values of a sample that the convolutions after the first one take."""
DENSE_INPUTS = (9216, 4096, 4096)
DENSE_OUTPUTS = (4096, 4096, 1000)
CONV_WEIGHTS = 2_469_696
DENSE_WEIGHTS = sum(n * m + m for n, m in zip(DENSE_INPUTS, DENSE_OUTPUTS, strict=True))
SAMPLES = 128
"""Samples a GPU and step."""
PURE_SPEEDUP, HYBRID_SPEEDUP, NUM_GPUS = 2.2, 3.1, 4
"""Speed-ups that the survey names, and their number of GPUs."""
LATENCY_S = 20e-6
"""Latency of a message over PCI Express through the host."""


@dataclass(frozen=True)
class Machine:
    """GPUs of one machine: seconds of one for the computation of `SAMPLES` samples, and the link between any two."""

    compute_s: float
    link: AlphaBeta


def data_parallel_s(machine: Machine, num_gpus: int) -> float:
    """Return the seconds of exchange in a step of data parallelism: a ring all-reduce of all gradients."""
    return cost_s("ring", num_gpus, (CONV_WEIGHTS + DENSE_WEIGHTS) * FLOAT_BYTES, machine.link)


def hybrid_s(machine: Machine, num_gpus: int) -> float:
    """Return the seconds of exchange in a step of the hybrid.

    The gradients of the convolutions are summed by a ring. For each dense layer, each GPU sends the inputs that it has
    to every other, and gets their gradients back: those of its samples, or of its part of the neurons.
    """
    convolutions_s = cost_s("ring", num_gpus, CONV_WEIGHTS * FLOAT_BYTES, machine.link)
    return convolutions_s + _divided_layers_s(machine, num_gpus, DENSE_INPUTS)


def model_parallel_s(machine: Machine, num_gpus: int) -> float:
    """Return the seconds of exchange in a step of model parallelism: what `hybrid_s` sends for dense layers, for all.

    The GPUs compute the same samples, as many as they would with the samples divided. A GPU holds its channels of the
    inputs of each layer, which it sends to every other. All have the images.
    """
    return _divided_layers_s(machine, num_gpus, (*CONV_INPUTS, *DENSE_INPUTS))


def _divided_layers_s(machine: Machine, num_gpus: int, inputs: Sequence[int]) -> float:
    """Return the seconds in which the inputs of layers, their gradients, and the last outputs are exchanged."""
    layers_s = sum(2 * (num_gpus - 1) * machine.link.time_s(SAMPLES * n * FLOAT_BYTES) for n in inputs)
    return layers_s + (num_gpus - 1) * machine.link.time_s(SAMPLES * DENSE_OUTPUTS[-1] * FLOAT_BYTES)


def speedup(machine: Machine, num_gpus: int, exchange_s: float) -> float:
    """Return how many times as many samples a second as one GPU they compute, if nothing overlaps."""
    return num_gpus * machine.compute_s / (machine.compute_s + exchange_s)


def calibrated(compute_s: float = 0.1) -> Machine:
    """Return the machine on which data parallelism has the speed-up that the survey names.

    Args:
        compute_s: seconds of one GPU for its samples; the speed-ups hardly depend on it, as the link is in proportion.
    """
    exchange_s = compute_s * (NUM_GPUS / PURE_SPEEDUP - 1)
    alpha_part_s = data_parallel_s(Machine(compute_s, AlphaBeta(LATENCY_S, 0.0)), NUM_GPUS)
    unit_s = data_parallel_s(Machine(compute_s, AlphaBeta(0.0, 1.0)), NUM_GPUS)
    return Machine(compute_s, AlphaBeta(LATENCY_S, (exchange_s - alpha_part_s) / unit_s))
