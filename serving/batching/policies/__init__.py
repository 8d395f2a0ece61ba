"""When to run a batch that is not full."""

from __future__ import annotations

from orchestray.platform.errors import ConfigError
from orchestray.serving.batching.policies.adaptive import Adaptive
from orchestray.serving.batching.policies.base import Opportunity, Policy
from orchestray.serving.batching.policies.fixed import Fixed
from orchestray.serving.batching.policies.greedy import Greedy

__all__ = ["POLICIES", "Adaptive", "Fixed", "Greedy", "Opportunity", "Policy", "make_policy"]

POLICIES = ("adaptive", "greedy", "fixed")


def make_policy(name: str, *, timeout_ms: float | None = None) -> Policy:
    """The policy that a config names; `fixed` needs `timeout_ms`, the others must not have one."""
    if name not in POLICIES:
        raise ConfigError(f"policy: must be one of {', '.join(POLICIES)}, got {name!r}")
    if name == "fixed":
        if timeout_ms is None:
            raise ConfigError("timeout_ms: the policy fixed needs it; adaptive finds its own")
        return Fixed(timeout_ms)
    if timeout_ms is not None:
        raise ConfigError(f"timeout_ms: the policy {name} has none; use fixed, or leave it out")
    return Adaptive() if name == "adaptive" else Greedy()
