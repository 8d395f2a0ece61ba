"""The last change of a running endpoint, kept by the cluster: an ingress that dies is replaced by one that knows it."""

from __future__ import annotations

import hashlib
import json
from typing import Any, TypeAlias

from orchestray.platform.cluster import key_values

Wanted: TypeAlias = dict[str, Any]
"""`config`, `settings`, `deployments` and `reserves_cpus` of an endpoint, as `application` makes them: JSON values."""


class ChangeMemory:
    """The change that an endpoint has made since it was deployed, in the cluster's key-value store.

    Args:
        deployed: the `user_config` that the endpoint was deployed with: one that is deployed again forgets the change.
    """

    def __init__(self, deployed: Wanted) -> None:
        from ray import serve

        self._deployed = deployed
        self._digest = hashlib.sha256(json.dumps(deployed, sort_keys=True).encode()).hexdigest()
        self._key = f"orchestray-change-{serve.get_replica_context().app_name}"

    def latest(self) -> Wanted:
        """Return the config of the last change; without one, that of the deployment."""
        kept = key_values.get(self._key) or {}
        changed: Wanted = kept["wanted"] if kept.get("since") == self._digest else self._deployed
        return changed

    def write(self, wanted: Wanted) -> None:
        """Keep a change."""
        key_values.put(self._key, {"since": self._digest, "wanted": wanted})
