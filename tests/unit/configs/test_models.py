"""Models that users bring, as in configs/models: each learns what it would in a single process of plain PyTorch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import DeQuantStub, QuantStub, default_qat_qconfig, prepare_qat

from orchestray.platform.errors import ConfigError
from orchestray.platform.task import Task, TaskSource, build_task
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.core.rng import building
from orchestray.trainers.sync.zero import fully_sharded
from orchestray.trainers.sync.zero.fsdp_units import unit_modules
from support.layers import ROOT
from support.layouts import LaidOut, layout_settings, train_laid_out
from support.pages import blocks
from support.plain import train_plainly

pytestmark = pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
FOLDER = ROOT / "configs" / "models"
MODELS = sorted(file.stem for file in FOLDER.glob("*.py"))
MOST_LINES = 40
STEPS, RATE = 2, 0.005
LAYOUTS: dict[str, dict[str, Any]] = {
    "data 2": {"network": {"data": 2}},
    "data 2, accumulate 4": {"network": {"data": 2}, "accumulate": 4},
    "ZeRO-3": {"network": {"data": 2}, "exchange": {"shard": "parameters"}},
    "tensor 2": {"network": {"tensor": 2}},
    "pipeline 2": {"network": {"pipeline": 2, "microbatches": 4}},
}
UNEVEN = {"network": {"data": 3}, "accumulate": 2, "batch_size": 51, "steps": 6}
"""A layout in which two of three workers get no sample of the last batch of an epoch, which has one of 256."""
REFUSED = {
    ("contrastive", "data 2, accumulate 4"): r"gathers outputs sees the whole batch at once, so train\.accumulate",
    ("contrastive", "pipeline 2"): r"and strategy\.network\.pipeline must be 1",
    ("force_field", "tensor 2"): r"the model's forward takes gradients itself, and those through split layers",
    ("force_field", "pipeline 2"): r"it takes gradients in its forward pass, and a cut would end the graph",
    (
        "lstm",
        "pipeline 2",
    ): r"depends on the data\. .* move that code to a module of its own, which is then called whole",
}
OF_MICRO_BATCHES = {"quantised", "resnet18"}
"""Models in which a micro-batch is more than a part of the batch: it has its mean and variance, or counts passes."""
IN_FLOAT32 = {"quantised"}
"""Models that torch does not compute in double precision."""
LEFT_OUT = {(name, "data 2") for name in MODELS if name != "contrastive"}
"""Pairs that the layout that accumulates shows as well; one model cannot accumulate."""
TRAINED = [key for key in product(MODELS, LAYOUTS) if key not in REFUSED.keys() | LEFT_OUT]


@pytest.fixture(scope="module", autouse=True)
def _digits_are_read_once() -> Iterator[None]:
    """Read the text of the digits once, and not in each worker of each run."""
    with pytest.MonkeyPatch.context() as patch:
        from sklearn import datasets

        patch.setattr(datasets, "load_digits", cache(datasets.load_digits))
        yield


def task_of(name: str) -> Task:
    return build_task(TaskSource.from_config(load_train_config(FOLDER / f"{name}.yaml").task))


def keys(name: str, *, network: Any = None, **others: Any) -> dict[str, Any]:
    return {
        "network": {"microbatches": None, **(network or {})},
        "steps": STEPS,
        "batch_size": 32,
        "optimizer": {"type": "sgd", "lr": RATE, "momentum": 0.9},
        "precision": "float32" if name in IN_FLOAT32 else "float64",
        **others,
    }


def trained(name: str, layout: dict[str, Any]) -> LaidOut:
    return train_laid_out(lambda: task_of(name), layout_settings(**keys(name, **layout)))


@cache
def plain(name: str, **train: Any) -> LaidOut:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)

    return train_plainly(task_of(name), make, joins=False, validates=True, **keys(name, **train))


def assert_learns_as_in_a_single_process(name: str, layout: dict[str, Any]) -> LaidOut:
    found = trained(name, layout)
    micro_batches = {"accumulate": layout.get("accumulate", layout["network"].get("microbatches", 1))}
    others = {key: value for key, value in layout.items() if key in ("batch_size", "steps")}
    right = plain(name, **others, **(micro_batches if name in OF_MICRO_BATCHES else {}))
    most = 1e-5 if name in IN_FLOAT32 else 1e-10
    assert found.losses == pytest.approx(right.losses, rel=0, abs=most)
    assert found.validation == pytest.approx(right.validation, rel=0, abs=most)
    assert found.weights.keys() <= right.weights.keys()  # tied weights are saved once
    apart = {key: float((value - right.weights[key]).abs().max()) for key, value in found.weights.items()}
    assert max(apart.values()) <= most
    return found


def warnings_of_buffers(found: LaidOut) -> list[str]:
    texts = [event["text"] for event in found.events if event["event"] == "warning"]
    return [text for text in texts if "depend on the samples of a worker's share" in text]


def test_each_of_the_models_has_a_config_which_begins_with_its_command() -> None:
    assert len(MODELS) == 11
    assert sorted(file.stem for file in FOLDER.glob("*.y*ml")) == MODELS
    for name in MODELS:
        file = FOLDER / f"{name}.yaml"
        assert file.read_text().startswith(f"# orchestray train configs/models/{name}.yaml\n# ")
        assert load_train_config(file).name == name


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_a_line_of_text_and_at_most_forty_of_code(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    first, *lines = [line for line in text.splitlines() if line.strip()]
    assert ast.get_docstring(ast.parse(text)) == first.strip('"')
    assert len([line for line in lines if not line.strip().startswith("#")]) <= MOST_LINES


@pytest.mark.parametrize(("name", "layout"), TRAINED)
def test_a_model_learns_what_it_would_in_a_single_process(name: str, layout: str) -> None:
    found = assert_learns_as_in_a_single_process(name, LAYOUTS[layout])
    assert not warnings_of_buffers(found)


@pytest.mark.parametrize("name", ["gpt2", "lora", "lstm", "resnet18", "vq_vae"])
def test_a_model_that_is_gathered_module_by_module_learns_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fully_sharded, "unit_modules", lambda model, _: unit_modules(model, 0))
    assert_learns_as_in_a_single_process(name, LAYOUTS["ZeRO-3"])


@pytest.mark.parametrize("name", ["bert", "force_field", "gan_like", "graph"])
def test_a_worker_without_a_sample_changes_nothing(name: str) -> None:
    assert_learns_as_in_a_single_process(name, UNEVEN)


@pytest.mark.parametrize(("name", "layout"), REFUSED)
def test_a_layout_that_cannot_be_is_refused_with_a_sentence(name: str, layout: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[name, layout]):
        trained(name, LAYOUTS[layout])


def test_a_run_says_that_observers_of_activations_see_the_samples_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_model(_: Task) -> nn.Module:
        model: Any = nn.Sequential(QuantStub(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10), DeQuantStub())
        model.qconfig = default_qat_qconfig
        prepared: nn.Module = prepare_qat(model)  # type: ignore[no-untyped-call]
        return prepared

    def observed() -> Task:
        task = task_of("quantised")
        monkeypatch.setattr(type(task), "build_model", build_model)
        return task

    found = train_laid_out(observed, layout_settings(**keys("quantised", **LAYOUTS["data 2"])))
    (text,) = warnings_of_buffers(found)
    assert "'1.activation_post_process.scale'" in text


@pytest.mark.parametrize("layout", ["data 2, accumulate 4", "ZeRO-3"])
def test_no_bit_of_what_adapters_are_put_on_changes(layout: str) -> None:
    with building(0):
        model: nn.Module = task_of("lora").build_model().double()
    found = trained("lora", LAYOUTS[layout]).weights
    trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    before = model.state_dict()
    assert {name for name, value in found.items() if not torch.equal(value, before[name])} == trains
    assert len(found) > 2 * len(trains)


def test_the_page_names_each_model_and_shows_one_as_it_is() -> None:
    page = ROOT / "docs" / "how-to" / "example-models.md"
    rows = re.findall(r"^\| \[(\w+)\]\(\.\./\.\./configs/models/(\w+)\.py\) \|", page.read_text(), flags=re.MULTILINE)
    assert sorted(rows) == [(name, name) for name in MODELS]
    (shown,) = [block for block in blocks(page) if block.purpose == "file"]
    assert shown.text == (FOLDER / shown.detail).read_text()
