"""Lower bounds for an all-reduce in the alpha-beta model: of its time, and of the bytes of its busiest rank.

Ben-Nun and Hoefler, "Demystifying Parallel and Distributed Deep Learning" (2019), section 2.5. L is the latency of a
message, G the time of a byte, n the bytes of the tensor, P the ranks:

    any all-reduce                L log2 P and n G
    one that repeats no addition  L log2 P + 2 n G (P - 1)/P
"""

from __future__ import annotations

import math

from orchestray.platform.comm.allreduce.costs import AlphaBeta


def latency_bound_s(size: int, model: AlphaBeta) -> float:
    """Return a lower bound for any all-reduce, L log2 P: each round at most doubles the ranks a value has reached."""
    return math.log2(size) * model.alpha_s


def bandwidth_bound_s(size: int, num_bytes: float, model: AlphaBeta) -> float:
    """Return a lower bound for any all-reduce, n G: each rank must receive that much to have the result."""
    return num_bytes * model.beta_s_per_byte if size > 1 else 0.0


def no_redundancy_bound_s(size: int, num_bytes: float, model: AlphaBeta) -> float:
    """Return a lower bound for an all-reduce that repeats no addition: L log2 P + 2 n G (P - 1)/P."""
    return latency_bound_s(size, model) + no_redundancy_bytes(size, num_bytes) * model.beta_s_per_byte


def no_redundancy_bytes(size: int, num_bytes: float) -> float:
    """Return the bytes, 2 n (P - 1)/P, that the busiest rank sends at least if no addition is repeated.

    Each element is then summed in P - 1 additions, for each of which one of two parts comes in a message; the sum is in
    one place, and goes from there to P - 1 ranks. That is 2 n (P - 1) bytes, over P ranks.
    """
    return 2 * num_bytes * (size - 1) / size
