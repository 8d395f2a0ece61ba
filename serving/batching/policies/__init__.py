"""Policies that decide when to run a batch that is not full."""

from __future__ import annotations

from orchestray.platform.errors import ConfigError
from orchestray.serving.batching.policies.adaptive import Adaptive
from orchestray.serving.batching.policies.base import Opportunity, Policy
from orchestray.serving.batching.policies.fixed import Fixed
from orchestray.serving.batching.policies.greedy import Greedy
from orchestray.serving.batching.policies.polled import Polled

__all__ = ["POLICIES", "Adaptive", "Fixed", "Greedy", "Opportunity", "Policy", "Polled", "make_policy"]

POLICIES: dict[str, type[Policy]] = {"adaptive": Adaptive, "greedy": Greedy, "fixed": Fixed, "polled": Polled}
"""Maps the name of a policy in a config to its class."""


def make_policy(name: str, *, timeout_ms: float | None = None) -> Policy:
    """Make the policy that a config names.

    Args:
        name: a key of `POLICIES`.
        timeout_ms: longest wait of the oldest request, for policies that need a timeout.

    Raises:
        ConfigError: the policy does not exist, or its timeout is missing or superfluous.
    """
    if name not in POLICIES:
        raise ConfigError(f"policy: must be one of {', '.join(POLICIES)}, got {name!r}")
    reason = timeout_problem(name, timeout_ms)
    if reason is not None:
        raise ConfigError(f"timeout_ms: {reason}")
    made: Policy = POLICIES[name](**({} if timeout_ms is None else {"timeout_ms": timeout_ms}))
    return made


def timeout_problem(name: str, timeout_ms: float | None) -> str | None:
    """Return what is wrong with the timeout of a policy, in a sentence, or None."""
    if POLICIES[name].needs_timeout and timeout_ms is None:
        return f"the policy {name} needs it; adaptive finds its own"
    if not POLICIES[name].needs_timeout and timeout_ms is not None:
        return f"the policy {name} has none; use fixed, or leave it out"
    return None
