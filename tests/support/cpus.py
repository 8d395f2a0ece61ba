"""CPUs of Ray that neither are free nor belong to a placement group that exists."""

from __future__ import annotations

import time

import ray
from ray.util import list_named_actors, placement_group_table

_PATIENCE_S = 30.0
"""Time that Ray may take to free what was given back."""


def lost_cpus() -> str:
    """Return a sentence about CPUs that are still lost after a while, with all that Ray says it has; empty: none."""
    if not ray.is_initialized():
        return ""
    until_s = time.monotonic() + _PATIENCE_S
    while (lost := _lost()) > 0.0 and time.monotonic() < until_s:
        time.sleep(0.05)
    if lost <= 0.0:
        return ""
    return (
        f"{lost:g} CPUs were not given back within {_PATIENCE_S:g} s. Ray has {ray.cluster_resources()}, of which "
        f"{ray.available_resources()} are free; placement groups {placement_group_table()}; named actors "
        f"{list_named_actors(all_namespaces=True)}"
    )


def _lost() -> float:
    groups = placement_group_table().values()
    bundles = [bundle for group in groups if group["state"] == "CREATED" for bundle in group["bundles"].values()]
    held = sum(bundle.get("CPU", 0.0) for bundle in bundles)
    return ray.cluster_resources().get("CPU", 0.0) - ray.available_resources().get("CPU", 0.0) - held
