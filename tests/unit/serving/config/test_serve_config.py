"""A serve config: every problem at once, each with its key and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestray.platform.errors import ConfigError
from orchestray.serving.config.load import dump_serve_yaml, is_serve_source, load_serve_config
from support.served import written_run


def config(run: Path, **more: Any) -> dict[str, Any]:
    return {"name": "endpoint", "models": [{"name": "digits", "run": str(run)}], **more}


def problems_of(source: Any, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_serve_config(source, overrides)
    return list(caught.value.problems)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_run(tmp_path_factory.mktemp("runs"))


def test_a_run_directory_is_a_config_of_its_own(run: Path) -> None:
    loaded = load_serve_config(run, ["http.port=0", "batching.max_batch_size=4"])
    assert (loaded.name, loaded.models[0].name, loaded.models[0].version) == ("digits", "digits", 1)
    assert (loaded.http.port, loaded.batching.max_batch_size, loaded.in_process) == (0, 4, True)
    assert loaded.traffic() == {("digits", 1): 100.0}


def test_a_class_in_a_file_is_a_config_of_its_own_with_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "iris.py").touch()
    monkeypatch.chdir(tmp_path)
    loaded = load_serve_config("iris.py:Iris", ["models.0.arguments.trees=3"])
    assert (loaded.name, loaded.models[0].name) == ("iris", "iris")
    assert loaded.models[0].run == str(tmp_path / "iris.py:Iris")
    assert loaded.models[0].arguments == {"trees": 3}
    assert load_serve_config({"name": "e", "models": [{"name": "m", "run": "iris.py:Iris"}]}).models == (
        loaded.models[0].model_copy(update={"name": "m", "arguments": {}}),
    )


def test_what_does_not_go_with_a_class_or_with_a_run_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "iris.py").touch()
    own = f"{tmp_path / 'iris.py'}:Iris"
    assert problems_of(str(tmp_path / "iris.py")) == [
        f"{tmp_path / 'iris.py'}: name a class or a function of it, as in {tmp_path / 'iris.py'}:Model"
    ]
    assert "there is no file" in problems_of(f"{tmp_path / 'none.py'}:Iris")[0]
    assert problems_of("package.module:Iris") == [
        "package.module:Iris: a class is served by its file, as in path/to/file.py:Model"
    ]
    assert problems_of(own, "compute.compile=true") == [
        f"{own}: compute: is for trained runs, and iris is a class that computes as it likes"
    ]
    (problem,) = problems_of(config(run), "models.0.arguments.trees=3")
    assert "are those of a class" in problem


def test_the_config_as_resolved_gives_the_same_config(run: Path, tmp_path: Path) -> None:
    loaded = load_serve_config(config(run, replicas={"min": 0, "max": 2}))
    (tmp_path / "again.yaml").write_text(dump_serve_yaml(loaded))
    assert load_serve_config(tmp_path / "again.yaml") == loaded


def test_paths_are_relative_to_the_file_and_those_of_overrides_to_where_one_is(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = run.parent / "configs" / "serve.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(yaml.safe_dump({"name": "e", "models": [{"name": "digits", "run": "../digits"}]}))
    assert load_serve_config(file).models[0].run == str(run)
    monkeypatch.chdir(run.parent)
    assert load_serve_config(file, ["models.0.run=digits"]).models[0].run == str(run)
    assert is_serve_source(file)
    assert not is_serve_source(run / "config.yaml")


def test_traffic_that_is_not_said_is_an_equal_part_of_what_is_left(run: Path) -> None:
    models = [{"name": "m", "run": str(run), "version": version} for version in (1, 2, 3, 4)]
    models[0]["traffic"] = 50
    models[3]["shadow"] = True
    loaded = load_serve_config({"name": "e", "models": models})
    assert loaded.traffic() == {("m", 1): 50, ("m", 2): 25, ("m", 3): 25}


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("http.prot=1", "http.prot: is no known key; did you mean 'port'?"),
        ("http.port=99999", "http.port: must be <= 65535, got 99999"),
        (
            "http.root_path=models/",
            (
                "http.root_path: must be a path such as /models/digits: parts of letters, digits, '.', '_', '~' and "
                "'-', and no / at its end, got 'models/'"
            ),
        ),
        (
            "models.0.name=a/b",
            "models.0.name: must be letters, digits, '.', '_' and '-', starting with a letter or a digit, got 'a/b'",
        ),
        ("replicas=0", "replicas: must be >= 1 or a mapping with min, max, target_latency_ms, got 0"),
        (
            "resources.gpus_per_worker=1.5",
            "resources.gpus_per_worker: must be a fraction of one GPU, or a whole number, got 1.5",
        ),
        (
            "compute.cuda_graphs=true",
            "compute.cuda_graphs: is for GPUs: leave it out, or set resources.gpus_per_worker",
        ),
        ("compute.pad_to=[4]", "compute.pad_to: is for compute.compile and GPUs, and batches are not padded here"),
        (
            "compute={pad_to: [8, 12], pad_to_multiple: 8}",
            "compute.pad_to: must be multiples of compute.pad_to_multiple (8), got 12",
        ),
        (
            "update={free_first: true, rollback: {error_rate: 1}}",
            "update.free_first: does not go with update.rollback, which keeps the versions of before loaded",
        ),
        ("replicas={min: 3, max: 2}", "replicas.min: must be <= replicas.max (2), got 3"),
        ("batching.policy=fixed", "batching.timeout_ms: the policy fixed needs it; adaptive finds its own"),
        ("batching.timeout_ms=5", "batching.timeout_ms: the policy adaptive has none; use fixed, or leave it out"),
        ("models.0.traffic=40", "models.0.traffic: the versions of digits must add up to 100, got 40"),
        ("models.0.shadow=true", "models.0.shadow: every version of digits is a shadow: who would answer?"),
        ("models=[]", "models: must list one model at least"),
        ("auth.tokens_file=/no/such", "auth.tokens_file: there is no file /no/such"),
    ],
)
def test_a_problem_names_its_key_and_what_was_wanted(run: Path, override: str, problem: str) -> None:
    assert f"config: {problem}" in problems_of(config(run), override)


def test_all_problems_are_told_at_once(run: Path) -> None:
    given = config(run, http={"port": -1, "tls": {"key": "k"}}, replicas="many", naem="x")
    keys = [problem.split(": ")[1] for problem in problems_of(given)]
    assert {"http.port", "replicas", "naem"} <= set(keys)


def test_the_same_version_twice_is_refused(run: Path) -> None:
    twice = {"name": "e", "models": [{"name": "m", "run": str(run)}] * 2}
    assert any("has a version 1 already" in problem for problem in problems_of(twice))


def test_a_run_that_is_not_there_or_has_no_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    assert any("there is no run in" in problem for problem in problems_of(config(tmp_path / "nothing")))
    assert any("there is no such run; `orchestray runs list`" in problem for problem in problems_of(tmp_path / "none"))
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    (unfinished / "config.yaml").write_text("name: unfinished\n")
    assert any("the run has not finished" in problem for problem in problems_of(unfinished))
    searched = tmp_path / "searched"
    searched.mkdir()
    (searched / "trials.jsonl").write_text("")
    assert any("found no run yet" in problem for problem in problems_of(searched))
