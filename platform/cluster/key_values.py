"""The key-value store of a Ray cluster, in which processes leave what others have to find when they are gone.

Ray keeps it on the head node. An actor with a name would do the same, but a call to it waits where a node is gone.
"""

from __future__ import annotations

import json
from typing import Any

from orchestray.platform.cluster import ray_internals

_PUT = "ray.experimental.internal_kv:_internal_kv_put"
_GET = "ray.experimental.internal_kv:_internal_kv_get"
_LIST = "ray.experimental.internal_kv:_internal_kv_list"
_DELETE = "ray.experimental.internal_kv:_internal_kv_del"


def put(key: str, value: Any) -> None:
    """Write a JSON value under a key.

    Raises:
        Exception: the store cannot be reached; Ray's errors have no common base class.
    """
    ray_internals.find(_PUT)(key, json.dumps(value), overwrite=True)


def get(key: str) -> Any:
    """Return the value of a key, or None if it has none; raises as `put` does."""
    written = ray_internals.find(_GET)(key)
    return None if written is None else json.loads(written)


def keys(prefix: str) -> list[str]:
    """Return the keys that begin like this; raises as `put` does."""
    return [key.decode() for key in ray_internals.find(_LIST)(prefix)]


def delete(key: str) -> None:
    """Remove a key, if it is there; raises as `put` does."""
    ray_internals.find(_DELETE)(key)
