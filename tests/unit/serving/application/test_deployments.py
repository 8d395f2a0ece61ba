"""Deployments of several versions may be made at once: Ray Serve alone does not bear that."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from orchestray.serving.application.deployments import model_deployment
from orchestray.serving.config.load import load_serve_config
from support.served import written_run


def test_versions_that_start_at_once_have_a_deployment_each(tmp_path: Path) -> None:
    config = load_serve_config(written_run(tmp_path, "digits"), ["replicas=2"])

    def made(number: int) -> Any:
        return model_deployment(config.models[0], config, f"version-{number}", reserves_cpus=True)

    with ThreadPoolExecutor(8) as pool:
        names = [each._bound_deployment.name for each in pool.map(made, range(64))]
    assert names == [f"version-{number}" for number in range(64)]
