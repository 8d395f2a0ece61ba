"""Gossip in virtual time: in each step every worker sends to one worker and receives from one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchestray.trainers.survey.cluster.network import Bytes, Network, Round

_NUM_RINGS = 3
"""Number of peers of a node in gossip SGD, about three in Ben-Nun and Hoefler (2019), section 7.2."""


def gossip(
    compute_s: NDArray[np.float64], num_bytes: float, network: Network, seed: int = 0
) -> tuple[NDArray[np.float64], Bytes]:
    """Return when each worker has done all steps, and the bytes of a step in the mean.

    The pairs of a step come from a ring of all workers in random order, drawn in each step from three rings. A worker
    waits only for the one that it receives from, and for its own port.

    Args:
        compute_s: seconds of each step of each worker, [num_steps, num_workers].
        num_bytes: bytes of the parameters.
        network: the workers and their links.
        seed: seed of the rings.
    """
    num_steps, num_workers = compute_s.shape
    draw = np.random.default_rng(seed)
    done_s = np.zeros(num_workers)
    if num_workers == 1:
        return compute_s.sum(axis=0), Bytes()
    rings: list[Round] = [network.rings(draw.permutation(num_workers)[None], num_bytes) for _ in range(_NUM_RINGS)]
    sent = Bytes()
    for row, which in zip(compute_s, draw.integers(_NUM_RINGS, size=(int(num_steps),)), strict=True):
        done_s = rings[which].after(done_s + row)
        sent += rings[which].num_bytes
    return done_s, sent.times(1 / num_steps)
