"""Splitting a model: all or nothing, held against the plain model, and the same placement as DTensor's."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.platform.comm.solo import SoloCollective
from orchestray.platform.errors import ConfigError
from orchestray.trainers.parallel.tensor.apply import split_model
from orchestray.trainers.parallel.tensor.base import Split
from support import dtensor_peer
from support.forked import Forked
from support.split_models import assert_close, build, check_split
from support.threads import run_replicas

PAIR = {"0": "output", "2": "input"}


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 12), nn.GELU(), nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 5))


def split_alone(model: nn.Module, plan: dict[str, str], size: int = 2, example: Any = None) -> Split:
    group = SoloCollective()
    return split_model(model, plan, lambda: group, 0, size, example=example)


def refused(model: nn.Module, plan: dict[str, str], example: Tensor, size: int = 2) -> str:
    """Return why the workers refuse to split; each leaves its model as it was."""
    models = [copy.deepcopy(model) for _ in range(size)]

    def run(group: Collective) -> str:
        own = models[group.rank]
        with pytest.raises(ConfigError) as caught:
            split_model(own, plan, lambda: group, group.rank, group.size, example=example)
        assert [type(module) for module in own.modules()] == [type(module) for module in model.modules()]
        assert_close(own(example), model(example), 0.0, "the model that was left")
        return str(caught.value)

    sentences = set(run_replicas(size, run))
    assert len(sentences) == 1, "the workers disagree"
    return sentences.pop()


def test_what_is_not_split_stays_whole_and_the_same_object() -> None:
    model = mlp()
    whole = model[4].weight
    split = split_alone(model, PAIR)
    assert set(split.pieces) == {"0.weight", "0.bias", "2.weight"}
    assert model[4].weight is whole
    assert [tuple(p.shape) for p in model.parameters()] == [(6, 5), (6,), (7, 6), (7,), (5, 7), (5,)]


def test_one_worker_or_an_empty_plan_change_nothing() -> None:
    for plan, size in ((PAIR, 1), ({}, 2)):
        model = mlp()
        before = list(model.parameters())
        assert split_alone(model, plan, size).pieces == {}
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


def test_modules_keep_their_kind_and_the_model_can_be_copied() -> None:
    def run(group: Collective) -> Tensor:
        model = build(mlp)
        split_model(model, {**PAIR, "4": "output_gathered"}, lambda: group, group.rank, group.size)
        assert isinstance(model[0], nn.Linear)
        y: Tensor = copy.deepcopy(model)(numbers(3, 5))
        assert torch.equal(y, model(numbers(3, 5)))
        return y

    plain = build(mlp)(numbers(3, 5))
    for y in run_replicas(2, run):
        assert_close(y, plain, 1e-12, "output")


def test_the_group_may_change_between_passes() -> None:
    """Check that the model's layers use the new group after the gang has met again."""
    members: dict[int, Collective] = {}
    models = [build(mlp) for _ in range(2)]

    def first(group: Collective) -> None:
        members[group.rank] = group
        split_model(models[group.rank], PAIR, lambda rank=group.rank: members[rank], group.rank, group.size)  # type: ignore[misc]
        models[group.rank](numbers(3, 5))

    def second(group: Collective) -> Tensor:
        members[group.rank] = group
        y: Tensor = models[group.rank](numbers(3, 5))
        return y

    run_replicas(2, first)
    plain = build(mlp)(numbers(3, 5))
    for y in run_replicas(2, second):
        assert_close(y, plain, 1e-12, "output")


def test_a_plan_that_changes_what_is_computed_is_refused_with_the_first_module_that_differs() -> None:
    class Softmaxed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(5, 5)
            self.up = nn.Linear(5, 8)
            self.down = nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(self.up(self.before(x)).softmax(-1))
            return y

    plan = {"before": "output_gathered", "up": "output", "down": "input"}
    sentence = refused(build(Softmaxed), plan, numbers(4, 5))
    assert "This plan changes what the model computes: the first output that differs, by up to " in sentence
    assert "is that of the module 'down' (Linear), split in the style 'input'. Leave it out of the plan" in sentence


def test_a_plan_under_which_the_model_fails_is_refused_with_where_it_fails() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3)).double()
    sentence = refused(model, {"0": "output", "2": "input"}, numbers(4, 5))
    assert "Split by this plan, the model fails in the module '1' (LayerNorm): " in sentence


def test_a_bare_split_output_at_the_end_is_refused() -> None:
    assert "changes what the model computes" in refused(build(mlp), {"4": "output"}, numbers(4, 5))


def test_outputs_in_dictionaries_and_tuples_are_compared() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(5, 4)
            self.b = nn.Linear(5, 4)

        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"a": self.a(x), "rest": (self.b(x).sum(-1), 3)}

    models = [copy.deepcopy(build(Nested)) for _ in range(2)]

    def run(group: Collective) -> None:
        model = models[group.rank]
        with pytest.raises(ConfigError, match=r"that of the module 'b'|that of the model itself"):
            split_model(model, {"b": "output"}, lambda: group, group.rank, group.size, example=numbers(3, 5))
        plan = {"b": "output_gathered", "a": "input_scattered"}
        assert split_model(model, plan, lambda: group, group.rank, group.size, example=numbers(3, 5)).pieces

    run_replicas(2, run)


def test_outputs_in_attributes_of_objects_are_compared() -> None:
    @dataclass(slots=True)
    class Answer:
        logits: Tensor
        hidden: list[Tensor]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Answer:
            hidden = torch.tanh(self.a(x))
            return Answer(self.b(hidden), [hidden])

    model = build(Model)
    models = [copy.deepcopy(model) for _ in range(2)]

    def run(group: Collective) -> None:
        plan = {"a": "output", "b": "input"}
        with pytest.raises(ConfigError, match="changes what the model computes"):
            split_model(models[group.rank], plan, lambda: group, group.rank, group.size, example=numbers(3, 5))

    run_replicas(2, run)


def test_a_parameter_with_a_hook_on_its_gradient_is_not_cut() -> None:
    for kind in ("register_hook", "register_post_accumulate_grad_hook"):
        model = build(mlp)
        getattr(model[0].weight, kind)(lambda tensor: None)
        with pytest.raises(ConfigError, match=r"The parameter '0\.weight' has a hook on its gradient"):
            split_alone(model, PAIR)
        assert model[0].weight.shape == (12, 5)


def test_holding_it_against_the_plain_model_leaves_modes_buffers_and_random_numbers_alone() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2)).double()
    model[1].eval()
    model[:2].requires_grad_(False)  # their gradients would tell the other worker from this one
    state = torch.get_rng_state()

    class Twice(SoloCollective):
        """A group whose other worker has the same tensors."""

        def all_gather(self, tensor: Tensor) -> Tensor:
            return torch.stack([tensor, tensor])

    group = Twice()
    model[3].weight.data[1] = model[3].weight.data[0]
    model[3].bias.data[1] = model[3].bias.data[0]
    before = copy.deepcopy(model.state_dict())
    split_model(model, {"3": "output_gathered"}, lambda: group, 0, 2, example=numbers(3, 5))
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model] == [True, False, True, True]
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before if not name.startswith("3"))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_peer_lost_while_it_is_held_against_the_plain_model_surfaces_as_such() -> None:
    def run(group: Collective) -> None:
        if group.rank == 1:
            group.abort()
            return
        model = build(mlp)
        with pytest.raises(PeerLostError):
            split_model(model, PAIR, lambda: group, group.rank, group.size, example=numbers(3, 5))
        assert model[0].weight.shape == (12, 5)

    run_replicas(2, run)


def test_all_that_a_style_refuses_leaves_the_model_whole() -> None:
    model = build(mlp)
    hook = model[0].register_forward_hook(lambda _m, _i, _o: None)
    with pytest.raises(ConfigError):
        split_alone(model, {**PAIR, "3": "embedding"})
    assert torch.equal(model(numbers(3, 5)), build(mlp)(numbers(3, 5)))
    assert all("entrance" not in vars(module) for module in model.modules())
    hook.remove()
    assert not model[0]._forward_hooks


def test_a_module_used_twice_is_split_once() -> None:
    def make() -> nn.Module:
        shared = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5))
        return nn.Sequential(shared, nn.Tanh(), shared)

    workers = check_split(make, {"0.0": "output", "0.2": "input"}, numbers(4, 5), 2)
    assert workers[0][0].pieces["2.0.weight"] == workers[0][0].pieces["0.0.weight"]


def test_the_same_placements_and_results_as_dtensor_with_one_all_reduce_forward(tmp_path: Path) -> None:
    """Compare with `torch.distributed.tensor.parallel.parallelize_module`: column-wise, then row-wise layers."""
    peers = Forked(Path(dtensor_peer.__file__), str(tmp_path))

    def run(group: Collective) -> tuple[int, dict[str, Tensor]]:
        model = dtensor_peer.make()
        split_model(model, PAIR, lambda: group, group.rank, group.size)
        y = model(dtensor_peer.inputs())
        sent = group.bytes_sent
        (y**2).sum().backward()
        held = {"output": y.detach()}
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            held[name], held[f"{name}.grad"] = parameter.detach(), parameter.grad
        return sent, held

    ours = run_replicas(2, run)
    with peers:
        assert peers.wait() == 0, peers.printed()
    for rank in range(2):
        counts = json.loads((tmp_path / f"rank-{rank}.json").read_text(encoding="utf-8"))
        assert sum(counts.values()) == 1
        assert "all_reduce" in next(iter(counts))
        sent, held = ours[rank]
        assert sent == dtensor_peer.SAMPLES * dtensor_peer.WIDTHS[-1] * 8  # one all-reduce of the output of two workers
        theirs = load_file(tmp_path / f"rank-{rank}.safetensors")
        assert set(held) == set(theirs)
        for name, tensor in theirs.items():
            assert_close(held[name], tensor, 1e-12, name)
