"""Group B: batch normalisation of one process, of the whole batch over workers, and of each worker's part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.trainers.core.batch_norm import synchronize
from orchestray.trainers.core.rng import seed_everything
from support.threads import run_replicas
from support.training import State, digits, furthest, settings_for, state_of, stream_of, train

OPTIONS: dict[str, Any] = {"steps": 6, "batch_size": 64, "optimizer": {"type": "sgd", "lr": 0.1, "momentum": 0.9}}


def cnn() -> Any:
    return digits(model="cnn", hidden=[4, 8])


def test_batch_normalization_equals_torch_and_its_definition() -> None:
    torch.manual_seed(0)
    inputs, scale = (torch.randn(5, 3, 4, 4, dtype=torch.float64) * 3 + 1 for _ in range(2))
    theirs = nn.BatchNorm2d(3).double()
    right = inputs.clone().requires_grad_()
    (theirs(right) * scale).sum().backward()
    mean = inputs.mean(dim=(0, 2, 3), keepdim=True)
    variance = ((inputs - mean) ** 2).mean(dim=(0, 2, 3), keepdim=True)

    def with_an_idle_peer(collective: Collective) -> tuple[Tensor, Tensor | None, State]:
        ours = synchronize(nn.Sequential(nn.BatchNorm2d(3)).double(), lambda: collective)
        kept = slice(None) if collective.rank == 0 else slice(0, 0)
        left = inputs[kept].clone().requires_grad_()
        outputs = ours(left)
        (outputs * scale[kept]).sum().backward()
        return outputs.detach(), left.grad, state_of(ours)

    (outputs, gradient, state), _ = run_replicas(2, with_an_idle_peer)
    torch.testing.assert_close(outputs, (inputs - mean) / (variance + 1e-5).sqrt(), rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, right.grad, rtol=0, atol=1e-12)
    for one, other in zip(state.values(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_batch_normalization_of_a_run_is_its_definition_in_every_channel() -> None:
    seen: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    kinds: set[type] = set()

    def note(layer: Any, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
        if layer.training:
            seen.append(
                (inputs[0].detach().clone(), outputs.detach().clone(), layer.weight.clone(), layer.bias.clone())
            )

    def watch(replica: Any, *_: object) -> None:
        for layer in replica.model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                kinds.add(type(layer))
                layer.register_forward_hook(note)

    run = train(cnn(), prepare=watch, **OPTIONS)[0]
    assert kinds == {nn.BatchNorm2d}
    assert len(seen) == 2 * OPTIONS["steps"]
    assert not torch.equal(seen[-1][2], torch.ones_like(seen[-1][2]))  # scale and shift are learned
    for inputs, outputs, scale, shift in seen:
        mean = inputs.mean(dim=(0, 2, 3), keepdim=True)
        variance = ((inputs - mean) ** 2).mean(dim=(0, 2, 3), keepdim=True)
        wanted = (inputs - mean) / (variance + 1e-5).sqrt() * scale[:, None, None] + shift[:, None, None]
        torch.testing.assert_close(outputs, wanted, rtol=0, atol=1e-12)
    assert run.outcome.usage[0]["reports"]["Forward"] == [{"outputs": ["float64"], "batch_norms": {"BatchNorm2d": 6}}]


def test_batch_normalization_of_shards_differs_from_the_single_process() -> None:
    single = train(cnn(), **OPTIONS)[0]
    sharded = train(cnn(), 2, batch_norm="local", **OPTIONS)[0]
    assert furthest(sharded.after, single.after) > 1e-3


@pytest.mark.parametrize(("data", "batch_size"), [(2, 64), (3, 64), (3, 2)])
def test_synchronized_bn_equals_one_process_on_the_whole_batch(data: int, batch_size: int) -> None:
    options: dict[str, Any] = {
        **OPTIONS,
        "batch_size": batch_size,
    }  # a batch of two leaves the third worker without a sample
    single = train(cnn(), **options)[0]
    for run in train(cnn(), data, batch_norm="synchronized", **options):
        assert [line["loss"] for line in run.steps] == pytest.approx([line["loss"] for line in single.steps], abs=1e-9)
        assert furthest(run.after, single.after) <= 1e-9


def by_groups_of_32() -> list[State]:
    """Return the parameters after each step of a process that normalises each half of the batch by itself."""
    task = cnn()
    settings = settings_for(accumulate=2, **OPTIONS)
    seed_everything(settings.seed)
    model = task.build_model().double()
    parameters = dict(model.named_parameters())
    updates = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    states: list[State] = []
    with stream_of(task, settings)("train", 0).epoch(0) as shares:
        for share in shares:
            if len(states) == OPTIONS["steps"]:
                break
            updates.zero_grad()
            for group in share.micro_batches:
                assert group.num_samples == 32
                batch = {k: v.double() if v.is_floating_point() else v for k, v in group.batch.items()}
                (task.loss(model(batch["inputs"]), batch) / 2).backward()
            updates.step()
            states.append({name: value.detach().clone() for name, value in parameters.items()})
    return states


def test_local_bn_subsets_of_32_equal_one_process_with_the_same_groups() -> None:
    wanted = by_groups_of_32()
    for run in train(cnn(), 2, batch_norm="local", **OPTIONS):
        for state, expected in zip(run.weights, wanted, strict=True):
            assert furthest({name: state[name] for name in expected}, expected) <= 1e-9


def test_local_bn_subsets_send_nothing_while_they_normalise() -> None:
    def operations(batch_norm: str) -> list[tuple[str, int]]:
        during: list[tuple[str, int]] = []

        def watch(replica: Any, collective: Collective, calls: list[tuple[str, int]]) -> None:
            backward = replica.network.backward

            def whole_pass(*arguments: Any, **options: Any) -> Any:
                before = len(calls)
                result = backward(*arguments, **options)
                if collective.rank == 0:
                    during.extend(calls[before:])
                return result

            replica.network.backward = whole_pass

        train(cnn(), 2, batch_norm=batch_norm, prepare=watch, exchange={"overlap": False}, **OPTIONS)
        return during

    assert operations("local") == []  # gradients are sent after the backward pass here
    assert len(operations("synchronized")) > 0
