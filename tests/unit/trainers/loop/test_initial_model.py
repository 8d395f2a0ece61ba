"""Runs whose model begins in a way of its own: any layout trains it as one process does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from orchestray.platform.errors import ConfigError
from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good
from orchestray.platform.run.model_files import save_model
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.core.model_state import ModelState
from orchestray.trainers.core.weight_norm import folded
from orchestray.trainers.loop.checkpoint_source import Loaded, exported
from orchestray.trainers.saved.initial_weights import with_initial_weights
from support.central_run import central_settings, train_central
from support.layouts import LaidOut, layout_settings, train_laid_out
from support.training import digits, few_digits, furthest, same_bits, settings_for, train

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "data": ({"data": 3}, {}),
    "zero2": ({"data": 2}, {"shard": "gradients"}),
    "zero3": ({"data": 2}, {"shard": "parameters"}),
    "data x pipeline": ({"data": 2, "pipeline": 2}, {}),
}
SPLIT = {**LAYOUTS, "tensor": ({"tensor": 2}, {})}


def trained(settings: ReplicaSettings, task: Callable[[], Any] = few_digits, **kwargs: Any) -> LaidOut:
    return train_laid_out(lambda: with_initial_weights(task(), settings.initial), settings, **kwargs)


@cache
def one(init: str | None, weight_norm: bool) -> LaidOut:
    return trained(layout_settings(init=init, weight_norm=weight_norm))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_normalised_weights_are_trained_as_in_one_process(layout: str) -> None:
    found = trained(layout_settings(*LAYOUTS[layout], weight_norm=True))
    assert found.losses == pytest.approx(one(None, True).losses, rel=0, abs=1e-12)
    assert furthest(found.weights, one(None, True).weights) <= 1e-12
    assert found.losses[1] != one(None, False).losses[1]  # they are trained in another way


@pytest.mark.parametrize("layout", ["data", "tensor", "data x pipeline"])
def test_drawn_weights_are_the_same_under_every_layout(layout: str) -> None:
    found = trained(layout_settings(*SPLIT[layout], init="xavier_uniform"))
    assert found.losses == pytest.approx(one("xavier_uniform", False).losses, rel=0, abs=1e-12)
    assert found.losses[0] != one(None, False).losses[0]


def test_the_result_says_what_was_done_to_the_model_before_the_first_step(tmp_path: Path) -> None:
    assert one(None, False).outcome.usage[0]["initial"] == {}
    drawn = trained(layout_settings({"data": 2}, init="xavier_uniform")).outcome.usage[0]["initial"]["drawn"]
    layers = [layer for layer in few_digits().build_model().modules() if isinstance(layer, torch.nn.Linear)]
    squares = sum(2 / sum(layer.weight.shape) * layer.weight.numel() for layer in layers)  # Glorot's variance
    expected = (squares / sum(layer.weight.numel() for layer in layers)) ** 0.5
    assert drawn == {"tensors": 3, "root_mean_square": pytest.approx(expected, rel=0.05)}
    torch.save(few_digits().build_model().state_dict(), tmp_path / "weights.pt")
    chosen = layout_settings({"data": 2}, init_from=str(tmp_path / "weights.pt"), init_except=("4.*",), freeze=("0.*",))
    found = trained(chosen).outcome.usage[0]["initial"]
    assert found == {"loaded": 4, "frozen": 64 * 24 + 24}


def test_replicas_with_normalised_weights_send_nothing_more_than_their_gradients() -> None:
    """Add up the gradients of halves of the batch: they are that of the whole, as no length depends on samples."""
    sent = {}
    for weight_norm in (False, True):
        settings = settings_for(2, weight_norm=weight_norm)
        task = with_initial_weights(few_digits(), settings.initial)
        runs = train(task, data=2, weight_norm=weight_norm, optimizer={"type": "sgd", "lr": 1.0})
        sent[weight_norm] = runs[0].calls
    single = train(task, weight_norm=True, optimizer={"type": "sgd", "lr": 1.0})[0]
    assert furthest(runs[0].gradient, single.gradient) <= 1e-14
    assert [kind for kind, _ in sent[True]] == [kind for kind, _ in sent[False]]
    with_it, without = (sum(n for kind, n in sent[each] if kind == "all_reduce") for each in (True, False))
    lengths, new_parameters = 24 + 16 + 10, 3
    assert lengths <= with_it - without <= lengths + 3 * new_parameters  # with flags that say if each was used


def test_a_run_with_normalised_weights_goes_on_with_the_same_bits_and_ends_with_plain_ones(tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"weight_norm": True, "optimizer": {"type": "adam", "lr": 0.01}}
    whole = trained(layout_settings({"data": 2}, steps=4, **chosen))
    first = replace(layout_settings({"data": 2}, steps=2, **chosen), checkpoint_every_steps=100)
    trained(first, checkpoints=lambda: CheckpointWriter(tmp_path, keep=1))
    found, _ = latest_good(tmp_path)
    assert found is not None
    settings = layout_settings({"data": 2}, steps=4, **chosen)
    second = trained(settings, load=lambda: Loaded(found))
    assert same_bits(second.weights, whole.weights)
    plain = exported(settings, ModelState(whole.weights)).tensors
    assert plain.keys() == few_digits().build_model().state_dict().keys()
    assert same_bits(dict(plain), dict(folded(ModelState(whole.weights)).tensors))


def test_slices_of_normalised_weights_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"train\.weight_norm: keeps each layer's weights as lengths .* set tensor to 1"
    ):
        layout_settings({"tensor": 2}, weight_norm=True)


@pytest.mark.parametrize(
    ("key", "value", "needs"), [("init_gain", 2.0, r"train\.init draws"), ("init_except", "4.*", r"train\.init_from")]
)
def test_keys_that_need_another_one_are_refused_without_it(key: str, value: Any, needs: str) -> None:
    with pytest.raises(ConfigError, match=needs):
        settings_for(**{key: value})


# -- transfer ----------------------------------------------------------------------------------------------------------


def cnn() -> Any:
    return digits(model="cnn", hidden=[4, 6], validation_fraction=0.02)


CONVOLUTIONS = ("0.*", "1.*", "4.*", "5.*")
"""Parameters of the convolutions and of their normalisation; 9 is the head."""


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """Return a folder with a trained model, and its tensors."""
    place = tmp_path_factory.mktemp("pretrained")
    run = train(
        digits(model="cnn", hidden=[4, 6]), precision="float32", steps=60, optimizer={"type": "adam", "lr": 0.01}
    )
    save_model(place / "model", run[0].after, {})
    return place, run[0].after


@pytest.mark.parametrize("layout", SPLIT)
def test_frozen_layers_are_the_same_bytes_at_the_end_and_the_rest_is_that_of_one_process(
    layout: str, pretrained: tuple[Path, dict[str, Tensor]]
) -> None:
    place, before = pretrained
    keys: dict[str, Any] = {"init_from": str(place), "init_except": "9.*", "freeze": list(CONVOLUTIONS)}
    chosen = {**keys, "precision": "float32", "optimizer": {"type": "adamw", "lr": 0.01, "weight_decay": 0.1}}
    found = trained(layout_settings(*SPLIT[layout], **chosen), cnn)
    single = trained(layout_settings(**chosen), cnn)
    assert found.losses == pytest.approx(single.losses, rel=1e-4)
    for name, tensor in before.items():
        is_head = name.startswith("9.")
        assert torch.equal(found.weights[name], tensor) != is_head, name  # running statistics are frozen as well
        torch.testing.assert_close(found.weights[name], single.weights[name], rtol=1e-3, atol=1e-4)


def test_frozen_layers_are_the_same_bytes_under_parameter_servers_and_after_a_resumption(
    pretrained: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    place, before = pretrained
    keys: dict[str, Any] = {"init_from": str(place), "init_except": "9.*", "freeze": list(CONVOLUTIONS)}
    served = train_central(cnn, central_settings(2, {"shards": 2}, precision="float32", **keys), tmp_path)
    first = replace(layout_settings({"data": 2}, steps=2, precision="float32", **keys), checkpoint_every_steps=100)
    trained(first, cnn, checkpoints=lambda: CheckpointWriter(tmp_path / "checkpoints", keep=1))
    found, _ = latest_good(tmp_path / "checkpoints")
    assert found is not None
    second = layout_settings({"data": 2}, steps=4, precision="float32", **keys)
    resumed = trained(second, cnn, load=lambda: Loaded(found))
    whole = trained(second, cnn)
    assert same_bits(resumed.weights, whole.weights)
    for weights in (served.weights, resumed.weights):
        for name, tensor in before.items():
            assert torch.equal(weights[name], tensor) != name.startswith("9."), name


def test_a_target_is_reached_in_fewer_steps_than_from_a_random_start(
    pretrained: tuple[Path, dict[str, Tensor]],
) -> None:
    place, _ = pretrained
    until = {"until": {"metric": "accuracy", "value": 0.8}, "validate_every_steps": 1, "steps": 150}
    common: dict[str, Any] = {**until, "precision": "float32", "optimizer": {"type": "sgd", "lr": 0.1}}
    keys: dict[str, Any] = {"init_from": str(place), "init_except": "9.*", "freeze": list(CONVOLUTIONS)}
    steps = {}
    for name, chosen in (("transfer", {**common, **keys}), ("fresh", common)):
        task = with_initial_weights(digits(model="cnn", hidden=[4, 6]), settings_for(**chosen).initial)
        run = train(task, **chosen)[0]
        steps[name] = run.outcome.step
    assert steps["transfer"] <= steps["fresh"] / 2
    assert steps["transfer"] < 150


def test_the_shipped_config_leaves_the_convolutions_of_another_run_as_they_are() -> None:
    config = load_train_config(Path(__file__).parents[4] / "configs/train/digits-transfer.yaml")
    settings = ReplicaSettings.from_config(config, storage="", model_directory="")
    assert settings.initial.init_from is not None
    assert settings.initial.init_from.endswith("runs/digits-cnn")
    assert settings.initial.freeze == CONVOLUTIONS
