"""The words of a manifest on runs that are not on this machine; tests/unit/survey/test_serving.py has its shape."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from orchestray.cli.serve import serve
from orchestray.platform.errors import ConfigError
from orchestray.serving.config.load import load_serve_config
from orchestray.serving.lifecycle.manifest import manifest
from support.served import written_run


def written(folder: Path, *runs: Path) -> str:
    models = [{"name": f"model{index}", "run": str(run)} for index, run in enumerate(runs)]
    path = folder / "endpoint.yaml"
    path.write_text(yaml.safe_dump({"name": "e", "models": models, "replicas": 2}))
    return str(path)


def test_a_run_that_is_not_here_is_said_to_be_taken_for_one_process_beside_the_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(written(tmp_path, written_run(tmp_path, "here"), tmp_path / "away"), manifest=True)
    printed = capsys.readouterr()
    assert [part["kind"] for part in yaml.safe_load_all(printed.out)] == ["ConfigMap", "RayService"]
    (note,) = printed.err.splitlines()
    assert note.startswith(f"note: models.1.run: there is no run in {tmp_path / 'away'}")
    assert "takes it for a model in one process" in note
    assert "compute.network" in note


def test_a_manifest_with_all_runs_or_a_division_in_its_config_says_nothing_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(written(tmp_path, written_run(tmp_path, "here")), manifest=True)
    serve(written(tmp_path, tmp_path / "away"), ["compute.network={pipeline: 2}"], manifest=True)
    assert capsys.readouterr().err == ""


def test_stages_that_follow_from_memory_need_the_run_here(tmp_path: Path) -> None:
    source = written(tmp_path, tmp_path / "away")
    config = load_serve_config(source, ["compute.network={pipeline: 2, memory_gb: 0.1}"], look_at_files=False)
    with pytest.raises(ConfigError, match=r"models\.0\.run: there is no run in .*give compute\.network\.pipeline"):
        manifest(config)
