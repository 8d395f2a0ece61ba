"""An endpoint of a serve config generates text where its model does, with the versions and updates of all models."""

from __future__ import annotations

import asyncio
import gc
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from orchestray.platform.errors import CheckpointError, ConfigError
from orchestray.serving.application import starting
from orchestray.serving.application.endpoint import LiveEndpoint
from orchestray.serving.application.starting import (
    add_generator,
    check_divided,
    divided_network,
    gpus_of_listener,
    is_text,
)
from orchestray.serving.config.load import load_serve_config
from orchestray.serving.config.schema import ServeConfig
from orchestray.serving.generation.decoder import TransformerDecoder
from orchestray.serving.generation.engine import Engine
from orchestray.serving.generation.sampling import Sampling
from orchestray.serving.models.content import content_of
from orchestray.serving.models.quantize import num_bytes, quantize_int8
from orchestray.serving.routing.endpoint import ModelVersion
from orchestray.serving.sharded.partition import ServedNetwork, cut, plain_model
from orchestray.trainers.saved.run import load_run
from orchestray.trainers.tasks.transformer import Embedding
from support.http_endpoint import ROW_SUMS, row_sums, version_of
from support.served import written_run

TEXT = {"type": "python_source", "context": 32, "width": 16, "depth": 1, "heads": 2}
OWN = """
from orchestray.serving.generation.decoder import TransformerDecoder
from orchestray.trainers.tasks.digits import Digits
from orchestray.trainers.tasks.python_source import PythonSource

class Own(Digits):  # for the methods that are not looked at here
    def __init__(self, fails=False):
        self.fails = fails
        self.text = PythonSource(context=32, width=16, depth=1, heads=2)

    def build_model(self):
        return self.text.build_model()

    def example_inputs(self):
        return self.text.example_inputs()

    def decoder(self, model, max_rows, max_sequences):
        if self.fails:
            raise ValueError("no such decoder")
        return TransformerDecoder(model, max_rows=max_rows, max_sequences=max_sequences)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs_dir = tmp_path_factory.mktemp("runs")
    written_run(runs_dir, "text", task=TEXT)
    written_run(runs_dir, "retrained", task=TEXT, seed=1)
    tensors = load_run(runs_dir / "text").load_model().state_dict()
    written_run(runs_dir, "loud", task=TEXT, tensors={name: 8 * tensor for name, tensor in tensors.items()})
    written_run(runs_dir, "digits")
    (runs_dir / "own.py").write_text(OWN)
    for name, fails in (("own", False), ("failing", True)):
        written_run(runs_dir, name, task={"type": f"{runs_dir / 'own.py'}:Own", "fails": fails})
    both = {f"members.{member}.{name}": tensor for member in (0, 1) for name, tensor in tensors.items()}
    ensemble = {"ensemble": {"members": 2, "average": "outputs"}}
    written_run(runs_dir, "ensemble", task=TEXT, tensors=both, model_json=ensemble)
    return runs_dir


def config_of(runs: Path, *models: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": "texts", "models": [{**model, "run": str(runs / model["run"])} for model in models], **more}


async def started(config: ServeConfig, **more: Any) -> ModelVersion:
    """Start a version whose network is computed elsewhere, with what generates text in this process."""
    version = version_of(ROW_SUMS, row_sums)
    await add_generator(version, config.models[0], config, **more)
    return version


def test_models_generate_by_name_beside_others_and_an_update_changes_who_answers(runs: Path) -> None:
    text, digits = {"name": "text", "run": "text"}, {"name": "digits", "run": "digits"}
    ask = {"prompt": "import ", "max_tokens": 12}

    async def main() -> None:
        live = LiveEndpoint(load_serve_config(config_of(runs, digits, text)))
        await live.start()
        transport = httpx.ASGITransport(live, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://endpoint") as client:
            first = (await client.post("/generate", json=ask)).json()
            assert (first["model"], first["usage"]["tokens"]) == ("text", 12)
            assert (await client.post("/generate", json={**ask, "model": "digits"})).status_code == 404
            assert (await client.post("/predict?model=text", json={"inputs": [1] * 32})).status_code == 200
            metrics = (await client.get("/metrics")).text
            assert 'orchestray_requests_total{model="text",status="200",version="1"} 2.0' in metrics
            of_text = '{model="text",version="1"}'
            assert f"orchestray_generated_tokens_total{of_text} 12.0" in metrics
            assert f"orchestray_read_tokens_total{of_text} 7.0" in metrics
            assert f"orchestray_generating{of_text} 0.0" in metrics
            assert f"orchestray_kv_cache_used_ratio{of_text} 0.0" in metrics
            assert f"orchestray_first_token_seconds_count{of_text} 1.0" in metrics
            assert f"orchestray_token_seconds_count{of_text} 11.0" in metrics
            told = await live.apply(config_of(runs, digits, text, generation={"max_tokens": 8}))
            assert told == "a request may ask for 8 tokens"
            assert (await client.post("/generate", json=ask)).status_code == 422
            await live.apply(config_of(runs, digits, {**text, "run": "retrained"}))
            second = (await client.post("/generate", json=ask)).json()
            assert second["text"] != first["text"]
            await live.apply(config_of(runs, digits))
            assert (await client.post("/generate", json=ask)).status_code == 404
        await live.close()

    asyncio.run(main())


@pytest.mark.parametrize("compute", [{}, {"quantize": "int8"}])
def test_a_model_that_predicts_and_generates_in_one_process_is_in_memory_once(
    runs: Path, compute: dict[str, str]
) -> None:
    def networks() -> list[Any]:
        gc.collect()
        return [each for each in gc.get_objects() if type(each) is Embedding]

    async def main() -> None:
        before = networks()  # held, or a thread of an earlier test might let go of one meanwhile
        live = LiveEndpoint(load_serve_config(config_of(runs, {"name": "text", "run": "loud"}, compute=compute)))
        await live.start()
        assert len([each for each in networks() if not any(each is old for old in before)]) == 1
        version = live.registry["text"].main
        assert version.generator is not None
        predicting = version.predict(version.signature.parse([1] * 32))
        generation = version.generator.generate("import ", Sampling(max_tokens=20))
        outputs, _ = await asyncio.gather(predicting, generation.text())  # by two threads
        assert outputs["outputs"].shape == (32, 256)
        assert generation.num_tokens == 20
        await live.close()

    asyncio.run(main())


@pytest.mark.parametrize("replicas", [1, 2, {"min": 0, "max": 2}])
def test_a_task_of_one_s_own_with_a_decoder_generates_text_however_many_replicas_predict(
    runs: Path, replicas: Any
) -> None:
    config = load_serve_config(config_of(runs, {"name": "own", "run": "own"}, replicas=replicas))

    async def main() -> None:
        version = await started(config)
        assert version.generator_lacking is None
        assert version.generator is not None
        assert version.generator.context == 32
        generation = version.generator.generate("import ", Sampling(max_tokens=3))
        await generation.text()
        assert generation.num_tokens == 3
        await version.close()

    asyncio.run(main())
    assert is_text(config.models[0])


@pytest.mark.parametrize(
    ("run", "told", "logged"),
    [
        ("failing", "its log says why", "failing: ValueError: no such decoder"),  # names of files are not for callers
        ("ensemble", "This one is built otherwise", "This one is built otherwise"),
    ],
)
def test_an_endpoint_whose_model_cannot_generate_text_predicts_and_says_so(
    runs: Path, run: str, told: str, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        live = LiveEndpoint(load_serve_config(config_of(runs, {"name": "first", "run": "digits"})))
        await live.start()
        answer = await live.apply(config_of(runs, {"name": "text", "run": run}))
        assert "warning: The model text generates no text in the process that listens: " in answer
        assert told in answer
        transport = httpx.ASGITransport(live, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://endpoint") as client:
            assert (await client.post("/predict", json={"inputs": [1] * 32})).status_code == 200
            for body in ({"prompt": "x"}, {"prompt": "x", "model": "text"}):
                refused = await client.post("/generate", json=body)
                assert refused.status_code == 404
                assert told in refused.json()["error"]
                assert str(runs) not in refused.json()["error"]
                assert refused.json()["error"].endswith("POST /predict answers.")
        await live.close()

    asyncio.run(main())
    assert logged in caplog.text


def test_a_front_without_the_gpus_of_its_replicas_serves_their_predictions_and_says_why_it_generates_nothing(
    runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resources = {"gpus_per_worker": 64}  # more than any machine has
    config = load_serve_config(config_of(runs, {"name": "text", "run": "text"}, replicas=2, resources=resources))

    async def main() -> None:
        version = await started(config)
        assert version.generator is None
        assert version.generator_lacking is not None
        assert "resources.gpus_per_worker: asks for 64 GPU, and torch finds" in version.generator_lacking
        assert version.generator_lacking.removesuffix(". POST /predict answers.") in caplog.text
        answer = await version.predict(version.signature.parse(ROW_SUMS.example))
        assert answer["outputs"].tolist() == [6, 15]
        await version.close()

    asyncio.run(main())


def test_a_front_never_generates_on_a_gpu_that_ray_has_given_to_others(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # it sees one, and Ray has assigned it none
    resources = {"gpus_per_worker": 1}
    config = load_serve_config(config_of(runs, {"name": "text", "run": "text"}, replicas=2, resources=resources))
    version = asyncio.run(started(config))
    assert version.generator is None
    assert "Ray has set aside no GPU" in str(version.generator_lacking)


@pytest.mark.parametrize(
    ("gpus", "replicas", "names", "wanted"),
    [
        (0, 2, ["text"], 0),
        (1, 2, ["digits"], 0),
        (1, 2, ["digits", "text", "own"], 1),
        (0.5, 2, ["digits", "text"], 0.5),
        (0.4, 2, ["text", "loud"], 0.8),
        (0.4, 2, ["text", "loud", "own"], 1),
        (1, {"min": 1, "max": 2}, ["text"], 1),
        (0.5, 1, ["digits"], 0.5),
        (2, 1, ["digits", "text"], 2),
    ],
)
def test_gpus_are_set_aside_for_the_networks_of_the_process_that_listens(
    runs: Path, gpus: float, replicas: int | dict[str, int], names: list[str], wanted: float
) -> None:
    models = [{"name": name, "run": name} for name in names]
    resources = {"gpus_per_worker": gpus}
    config = load_serve_config(config_of(runs, *models, replicas=replicas, resources=resources))
    assert gpus_of_listener(config) == wanted


def test_a_front_with_a_gpu_of_its_own_takes_no_more_of_its_memory_than_ray_has_set_aside(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds: list[tuple[object, ...]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: bounds.append(given))
    monkeypatch.setattr(starting, "assigned_gpus", lambda: ("0",))
    models = [{"name": name, "run": name} for name in ("text", "loud")]
    config = load_serve_config(config_of(runs, *models, replicas=2, resources={"gpus_per_worker": 0.4}))
    starting._take_gpu(config)
    assert bounds == [(0.8, torch.device("cuda", 0))]


def test_a_run_trained_anew_while_its_replicas_start_is_not_generated_with(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "text", tmp_path / "text")
    content = content_of(tmp_path / "text")
    shutil.copytree(runs / "retrained" / "model", tmp_path / "text" / "model", dirs_exist_ok=True)
    config = load_serve_config(config_of(tmp_path, {"name": "text", "run": "text"}, replicas=2))
    with pytest.raises(CheckpointError, match="was written anew since this version was started"):
        asyncio.run(started(config, content=content))


@pytest.mark.parametrize("compute", [{"quantize": "int8"}, {"precision": "bfloat16"}])
def test_text_is_generated_in_the_precision_that_the_config_asks_for(runs: Path, compute: dict[str, str]) -> None:
    sampling = Sampling(max_tokens=64, temperature=1.0, seed=1)

    async def text_of(**settings: Any) -> str:
        config = load_serve_config(config_of(runs, {"name": "loud", "run": "loud"}, **settings))
        engine = (await started(config)).generator
        assert engine is not None
        try:
            return await engine.generate("import ", sampling).text()
        finally:
            await engine.close()

    async def wanted() -> str:
        model = load_run(runs / "loud").load_model()
        if "quantize" in compute:
            model = quantize_int8(model)
        decoder = TransformerDecoder(model, precision=compute.get("precision", "float32"))
        engine = Engine(decoder)
        try:
            return await engine.generate("import ", sampling).text()
        finally:
            await engine.close()

    rough = asyncio.run(text_of(compute=compute))
    assert rough == asyncio.run(wanted())
    assert rough != asyncio.run(text_of())


def test_a_model_is_divided_as_it_was_trained_unless_the_config_says_otherwise(runs: Path, tmp_path: Path) -> None:
    run = written_run(tmp_path, "pipeline", task={**TEXT, "depth": 4})
    config = run / "config.yaml"
    config.write_text(config.read_text() + "strategy: {network: {pipeline: 2, tensor: 1, split: ['2']}}\n")

    def divided(path: Path, **compute: Any) -> ServedNetwork | None:
        data = {"name": "x", "models": [{"name": "m", "run": str(path)}], "compute": compute}
        loaded: ServeConfig = load_serve_config(data)
        return divided_network(loaded.models[0], loaded)

    assert divided(runs / "text") is None
    assert divided(run) == ServedNetwork(pipeline=2, split=("2",))
    assert divided(run, network={}) is None
    assert divided(runs / "text", network={"tensor": 2}) == ServedNetwork(tensor=2)


def test_what_a_divided_model_does_not_have_is_refused_and_not_passed_over(runs: Path) -> None:
    config = load_serve_config(
        config_of(
            runs,
            {"name": "text", "run": "text"},
            compute={"compile": True},
            replicas={"min": 1, "max": 2},
        )
    )
    with pytest.raises(ConfigError) as refused:
        check_divided(config.models[0], config)
    assert [str(problem).partition(":")[0] for problem in refused.value.problems] == ["compute.compile", "replicas"]


def test_a_model_is_divided_into_as_many_stages_as_the_memory_of_a_process_asks_for(runs: Path, tmp_path: Path) -> None:
    run = written_run(tmp_path, "large", task={**TEXT, "width": 64, "depth": 6})
    model = load_run(run).load_model()

    def stages(memory_bytes: float) -> ServedNetwork | None:
        compute = {"network": {"memory_gb": memory_bytes / 1e9}}
        loaded = load_serve_config({"name": "x", "models": [{"name": "m", "run": str(run)}], "compute": compute})
        return divided_network(loaded.models[0], loaded)

    whole = num_bytes(model)
    assert stages(whole) is None
    half = stages(whole / 2 * 1.1)
    assert half is not None
    assert half.pipeline == 2
    task = load_run(run).load_task()
    layers, bounds = cut(task, plain_model(task), half, torch.zeros(2, 32, dtype=torch.int64))
    assert max(num_bytes(layers.part(*bound)) for bound in bounds) <= half.memory_limit_bytes
    with pytest.raises(ConfigError, match="split the layers over workers"):
        stages(1000)


def test_the_front_needs_no_torch_to_offer_generation() -> None:
    program = "import sys, orchestray.serving.generation.router, orchestray.serving.application.starting"
    script = f"{program}; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
