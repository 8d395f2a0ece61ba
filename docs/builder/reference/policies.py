"""Policies of batching."""

from __future__ import annotations

import inspect

from builder.reference.markdown import page, sentence, table
from orchestray.serving.batching.policies import POLICIES


def policies_page() -> str:
    """Return the page of all policies."""
    rows = []
    for name, policy in POLICIES.items():
        text = sentence(inspect.cleandoc(policy.__doc__ or "").partition("\n\n")[0])
        rows.append([f"`{name}`", text, "`batching.timeout_ms`" if policy.needs_timeout else "none"])
    introduction = (
        "Rules that decide when a batch runs that is not full: `batching.policy` of an endpoint's config. "
        "[The other keys](config-serve.md#batching) bound sizes and queues."
    )
    return page("Batching policies", introduction, table(["policy", "rule", "needs"], rows))
