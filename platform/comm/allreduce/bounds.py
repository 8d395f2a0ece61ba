"""Lower bounds for the time of an all-reduce in the alpha-beta model."""

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
    return latency_bound_s(size, model) + 2 * num_bytes * model.beta_s_per_byte * (size - 1) / size
