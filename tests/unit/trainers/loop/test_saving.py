"""A checkpoint has all that a model's modules need to go on with the same bits, or the run is refused first."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.solo import SoloCollective
from orchestray.platform.errors import CheckpointError, ConfigError
from orchestray.platform.run.checkpoint import CheckpointWriter, list_checkpoints
from orchestray.platform.run.checkpoint_files import RESUME_FILE, Found
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.loop.checkpoint_source import Loaded
from orchestray.trainers.loop.replica import Replica
from support.layouts import layout_settings
from support.stateful import KINDS, WIDTH, built, task_of, trained, whole_state
from support.threads import run_replicas
from support.training import furthest, regression, same_bits

LAYOUTS: dict[str, tuple[Any, Any]] = {
    "one": ({"microbatches": 1}, {}),
    "data": ({"data": 2, "microbatches": 1}, {}),
    "zero2": ({"data": 2, "microbatches": 1}, {"shard": "gradients"}),
    "zero3": ({"data": 2, "microbatches": 1}, {"shard": "parameters"}),
    "pipeline": ({"pipeline": 2, "microbatches": 2, "split": "equal"}, {}),
    "data x pipeline": ({"data": 2, "pipeline": 2, "microbatches": 2, "split": "equal"}, {}),
    "tensor": ({"tensor": 2, "microbatches": 1}, {}),
    "averaging": ({"data": 2, "microbatches": 1}, {"type": "averaging", "every": 2}),
}
SAVES_ITSELF = ("extra", "halved", "packed", "hooked", "nested")
BUFFERS = [kind for kind in KINDS if kind not in SAVES_ITSELF]


def settings(layout: str, kind: str = "", **train: Any) -> ReplicaSettings:
    network, exchange = LAYOUTS[layout]
    precision = "float32" if kind == "quantised" else "float64"
    chosen = {"batch_size": 8, "steps": 5, "optimizer": {"type": "adam", "lr": 0.01}, "precision": precision, **train}
    return layout_settings(network, exchange, **chosen)


def run(replicas: list[Replica], folder: Path | None = None, found: Found | None = None) -> None:
    """Train to the end, workers as threads; save in a folder, and go on from a checkpoint."""

    def body(world: Collective) -> None:
        replica = replicas[world.rank]
        replica.connect(world, (lambda: Loaded(found)) if found is not None and world.rank == 0 else None)
        if folder is None or world.rank != 0:
            replica.run(time.time())
            return
        with CheckpointWriter(str(folder), keep=9) as writer:
            replica.write_checkpoints_with(writer)
            replica.run(time.time())

    if len(replicas) == 1:
        body(SoloCollective())
    else:
        run_replicas(len(replicas), body)


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        *(("data", kind) for kind in [*KINDS, "nested"]),
        *(("one", kind) for kind in SAVES_ITSELF),
        # Each kind of buffer under one of the other layouts, which handle all kinds by the same code.
        *zip(cycle(("zero2", "pipeline", "tensor")), [kind for kind in BUFFERS if kind != "scripted"], strict=False),
        *(
            ("zero3", kind)
            for kind in ("flagged", "assigned", "not_saved", "resized", "running_mean_not_saved", "quantised")
        ),
        *(("data x pipeline", kind) for kind in ("assigned", "grows", "running_mean_not_saved")),
        *(("averaging", kind) for kind in ("assigned", "not_saved", "running_mean_not_saved", "spectral_norm")),
    ],
)
def test_a_run_that_is_resumed_has_the_bits_of_one_that_is_not(tmp_path: Path, layout: str, kind: str) -> None:
    task, chosen = task_of(kind), replace(settings(layout, kind), checkpoint_every_steps=3)
    whole, again = built(task, chosen), built(task, chosen)
    run(whole, tmp_path)
    found = list_checkpoints(tmp_path)[0]
    assert found.step == 3
    run(again, found=found)
    for one, other in zip(whole, again, strict=True):
        assert same_bits(whole_state(one), whole_state(other))


@pytest.mark.parametrize("by_data", [False, True])
def test_a_parameter_that_the_forward_pass_moves_is_copied_before_the_next_one(tmp_path: Path, by_data: bool) -> None:
    """One that is not trained, and so large that the next pass begins before it would be copied beside training."""

    class Code(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.code = nn.Parameter(torch.ones(4_000_000), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                (self.code.data if by_data else self.code).mul_(0.9)
            return x * self.code[0].clone()

    rows = regression(width=WIDTH)
    rows.build_model = lambda: nn.Sequential(Code(), nn.Linear(WIDTH, 1))  # type: ignore[method-assign]
    run(built(rows, replace(settings("one"), checkpoint_every_steps=1)), tmp_path)
    for found in list_checkpoints(tmp_path):
        values = load_file(tmp_path / found.name / "model.safetensors")["0.code"].unique()
        torch.testing.assert_close(values, torch.tensor([0.9**found.step], dtype=torch.float64))


def test_layers_of_the_same_shape_beside_a_module_that_loads_itself_keep_their_own_weights(tmp_path: Path) -> None:
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    task, chosen = task_of("flagged"), replace(settings("zero3"), checkpoint_every_steps=3)
    task._model = lambda: copy.deepcopy(nn.Sequential(KINDS["flagged"](), *layers, nn.Linear(WIDTH, 1)))
    whole, again = built(task, chosen), built(task, chosen)
    run(whole, tmp_path)
    run(again, found=list_checkpoints(tmp_path)[0])
    for one, other in zip(whole, again, strict=True):
        assert same_bits(whole_state(one), whole_state(other))


@pytest.mark.parametrize(
    ("saved", "resumed", "kind"),
    [
        *(("one", "pipeline", "grows"), ("pipeline", "tensor", "grows"), ("tensor", "one", "grows")),
        *(("one", "pipeline", "not_saved"), ("pipeline", "zero2", "not_saved"), ("zero2", "one", "not_saved")),
        *(("pipeline", "zero2", "late"), ("zero2", "tensor", "late"), ("tensor", "data", "late")),
    ],
)
def test_buffers_go_from_one_layout_to_another(tmp_path: Path, saved: str, resumed: str, kind: str) -> None:
    task = task_of(kind)
    run(built(task, replace(settings(saved), accumulate=2, checkpoint_every_steps=3)), tmp_path)
    again = built(task, replace(settings(resumed), accumulate=2))
    run(again, found=list_checkpoints(tmp_path)[0])
    (single,) = trained(task, replace(settings("one"), accumulate=2))
    assert single.position.step == again[0].position.step
    for replica in again:
        held = {name: buffer for name, buffer in replica.model.named_buffers() if name.startswith("0.")}
        assert not held or furthest(held, dict(single.model.named_buffers())) <= 1e-12


def test_a_model_of_plain_buffers_is_saved_as_before(tmp_path: Path) -> None:
    run(built(task_of("running_mean"), settings("one")), tmp_path)
    [found] = list_checkpoints(tmp_path)
    assert RESUME_FILE not in found.files
    assert "buffers" not in found.state


@pytest.mark.parametrize("layout", ["zero2", "zero3", "pipeline", "tensor", "averaging"])
@pytest.mark.parametrize("kind", SAVES_ITSELF)
def test_what_saves_itself_is_refused_where_no_worker_has_the_whole_model(layout: str, kind: str) -> None:
    with pytest.raises(
        ConfigError, match=r"The model saves .* in a way of its own .*use strategy\.exchange\.type: all"
    ):
        built(task_of(kind), settings(layout))
    with pytest.raises(ConfigError, match=r"no train\.average"):
        built(task_of(kind), settings("one", average={"type": "ema"}))


class Refuses(nn.Linear):
    """A layer that does not know what it saves."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "packed"] = self.weight.detach()


class Forgets(Refuses):
    """A layer that takes what it saves, and does nothing with it."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        state_dict.pop(prefix + "packed")


class Opaque(nn.Module):
    """A module with a state that no file keeps safely."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def get_extra_state(self) -> Any:
        return {"codec": Path("a")}

    def set_extra_state(self, state: Any) -> None:
        return


class LaterOpaque(Opaque):
    """The same, but for its first state."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return x

    def get_extra_state(self) -> Any:
        return {"codec": Path("a") if self.calls > 3 else None}


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (partial(Refuses, WIDTH, WIDTH), "saves a state that it does not load again.*0.packed"),
        (partial(Forgets, WIDTH, WIDTH), "A new model that loads it has other values in 0.packed"),
        (Opaque, r"has a PosixPath in 0\._extra_state\['codec'\], which no checkpoint can keep"),
        (LaterOpaque, r"has a PosixPath in 0\._extra_state\['codec'\], which no checkpoint can keep"),
    ],
)
def test_what_cannot_be_restored_is_refused_when_it_would_be_written_first(
    tmp_path: Path, make: Any, text: str
) -> None:
    chosen = replace(settings("one"), checkpoint_every_steps=2)
    task = task_of("in_place")
    task._model = lambda: nn.Sequential(make(), nn.Linear(WIDTH, 1))
    with pytest.raises(CheckpointError, match=text):
        run(built(task, chosen), tmp_path)
    assert max((found.step for found in list_checkpoints(tmp_path)), default=0) <= 2


def test_what_a_survivor_could_not_send_is_refused_at_the_start() -> None:
    task = task_of("in_place")
    task._model = lambda: nn.Sequential(Refuses(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    with pytest.raises(CheckpointError, match="saves a state that it does not load again"):
        run(built(task, settings("data")))


def test_a_state_that_is_verified_leaves_no_trace(tmp_path: Path) -> None:
    """Another model is built for it, which draws numbers."""
    expected = whole_state(trained(task_of("halved"), settings("one"))[0])
    torch.manual_seed(5)
    replicas = built(task_of("halved"), settings("one"))
    state = torch.get_rng_state()
    replicas[0].state()
    assert torch.equal(torch.get_rng_state(), state)
    run(replicas, tmp_path)
    assert same_bits(whole_state(replicas[0]), expected)
