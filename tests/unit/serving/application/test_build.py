"""The application of a config: what Ray Serve is to run of it, from the arguments of its commands, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestray.platform.errors import ConfigError
from orchestray.serving import app
from orchestray.serving.application.deployments import deployment_name, model_deployment
from orchestray.serving.application.serve_apps import own_error
from orchestray.serving.config.load import load_serve_config
from support.served import written_run


def wanted_by(application: Any) -> dict[str, Any]:
    """Return the config that an application's ingress is deployed with."""
    config: dict[str, Any] = application._bound_deployment.user_config["config"]
    return config


def test_arguments_of_serve_commands_name_a_run_or_a_config_and_change_keys_nested_or_dotted(tmp_path: Path) -> None:
    run = written_run(tmp_path, "digits")
    file = tmp_path / "other.yaml"
    file.write_text(yaml.safe_dump({"models": [{"name": "m", "run": str(run)}]}))
    keys = {"http": {"port": 8123, "tls": {}}, "batching.max_batch_size": "7"}
    for source, name in (({"run": str(run)}, "digits"), ({"config": str(file)}, "other")):
        config = wanted_by(app({**source, **keys}))
        assert (config["name"], config["models"][0]["run"]) == (name, str(run))
        assert (config["http"]["port"], config["batching"]["max_batch_size"]) == (8123, 7)


def test_an_application_leaves_the_usual_port_to_the_proxy_of_serve_unless_it_is_asked_for(tmp_path: Path) -> None:
    run = str(written_run(tmp_path, "digits"))
    for source, port in (
        (run, 0),
        ({"run": run, "http.read_timeout_s": 5}, 0),
        ({"run": run, "http.port": 8000}, 8000),
    ):
        assert wanted_by(app(source))["http"]["port"] == port


def test_ray_sets_a_gpu_aside_for_the_process_that_listens_where_it_generates_text_beside_replicas(
    tmp_path: Path,
) -> None:
    text = {"type": "python_source", "context": 32, "width": 16, "depth": 1, "heads": 2}
    for name, task, wanted in (("text", text, 1), ("digits", None, 0)):
        run = written_run(tmp_path, name, task=task)
        found: Any = app({"run": str(run), "replicas": 2, "resources.gpus_per_worker": 1})
        assert found._bound_deployment.ray_actor_options["num_gpus"] == wanted


@pytest.mark.parametrize("gpus", [0, 0.25, 0.5, 1, 2])
def test_ray_sets_aside_for_each_replica_the_gpus_or_the_fraction_of_one_that_the_config_says(
    tmp_path: Path, gpus: float
) -> None:
    config = load_serve_config(written_run(tmp_path, "digits"), ["replicas=2", f"resources.gpus_per_worker={gpus}"])
    found: Any = model_deployment(config.models[0], config, "replica", reserves_cpus=True)
    assert found._bound_deployment.ray_actor_options["num_gpus"] == gpus
    load, _ = found._bound_deployment.init_args
    assert load["gpus"] == gpus, "by which its share of the memory is bounded, and its device chosen"


@pytest.mark.parametrize("arguments", [{}, {"http.port": 1}, {"run": "a", "config": "b"}])
def test_arguments_that_name_none_or_both_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="one of run=RUN_DIR and config=FILE"):
        app(arguments)


def test_a_deployment_has_another_name_for_other_settings_and_for_a_run_that_was_trained_again(tmp_path: Path) -> None:
    def name_of(run: Path, *overrides: str) -> str:
        config = load_serve_config(run, overrides)
        return deployment_name(config.models[0], config)

    run = written_run(tmp_path, "digits")
    first = name_of(run)
    assert name_of(run, "http.port=1", "auth.requests_per_s=1") == first
    assert name_of(run, "batching.max_batch_size=4") != first
    other = written_run(tmp_path / "other", "digits", seed=1)
    (run / "model" / "model.json").write_text((other / "model" / "model.json").read_text())
    assert name_of(run) != first


def test_the_error_of_a_replica_is_the_last_of_ours_in_what_serve_says() -> None:
    message = (
        "A replica failed to start with exception. Retrying 2 more time(s). Error:\nTraceback:\n"
        "orchestray.platform.errors.TaskError: class Task lacks build_model\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        "orchestray.platform.errors.TaskError: runs/a cannot be served: class Task\nlacks build_model\n"
    )
    error = own_error(message)
    assert error is not None
    assert (str(error), error.exit_status) == ("runs/a cannot be served: class Task\nlacks build_model", 2)
    assert own_error("A replica failed to start with exception. Error:\nOSError: [Errno 28] No space left") is None
