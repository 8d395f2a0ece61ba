"""The gangs of the engine `actors`: who is given GPUs, by which the backend of each gang is chosen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.driver.engines import actors
from orchestray.trainers.driver.servers import driver as servers_driver
from support.search_loop import base


def gpus_of(monkeypatch: pytest.MonkeyPatch, strategy: dict[str, Any]) -> dict[str, float]:
    """Return the GPUs of a member of each gang of a run whose workers have half of one each, by the gang's role."""
    shapes: list[Any] = []

    def noted(_: Any, given: Any) -> Any:
        shapes.extend(given if isinstance(given, list) else [given])
        return SimpleNamespace(run=lambda: None)

    monkeypatch.setattr(actors, "Driver", noted)
    monkeypatch.setattr(servers_driver, "CentralDriver", noted)
    config = load_train_config(base() | {"resources": {"gpus_per_worker": 0.5}, "strategy": strategy})
    settings = ReplicaSettings.from_config(config, storage="", model_directory="")
    attempt: Any = SimpleNamespace(settings=settings, cluster=None)
    actors.run_in_actors(config, attempt)
    return {shape.role: shape.gpus_per_member for shape in shapes}


def test_workers_have_the_gpus_of_the_config_and_servers_beside_them_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus_of(monkeypatch, {"network": {"data": 2}}) == {"worker": 0.5}
    servers = {"exchange": {"type": "parameter_server", "groups": 2}, "network": {"data": 4}}
    assert gpus_of(monkeypatch, servers) == {"parameter_server": 0.0, "worker": 0.5, "leaf_server": 0.0}
