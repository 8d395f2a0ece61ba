"""Samples shared in the convolutional part, features in the fully connected one: the plain model, and fewer bytes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.platform.errors import ConfigError
from orchestray.trainers.core.batch_norm import synchronize
from orchestray.trainers.parallel.tensor.apply import split_model
from orchestray.trainers.parallel.tensor.assemble import make_plan
from orchestray.trainers.parallel.tensor.one_weird_trick import convolutional_part
from orchestray.trainers.parallel.tensor.plans import branches_plan, channels_plan, one_weird_trick_plan, spatial_plan
from orchestray.trainers.tasks.digits import Digits
from support.split_training import Run, check_same, train_split
from support.threads import run_replicas


def images(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def of(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*layers).double()


class AlexNet(nn.Module):
    """The AlexNet of torchvision, small."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Dropout2d(0.3), nn.Conv2d(4, 4, 3, padding=1), nn.Dropout(0.3), nn.ReLU()),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Sequential(
            *(nn.Dropout(0.3), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 3)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


def flat() -> nn.Sequential:
    return of(
        *(nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.3), nn.Conv2d(3, 2, 3, stride=2)),
        *(nn.Flatten(), nn.Linear(18, 8), nn.Tanh(), nn.Linear(8, 4)),
    )


@pytest.mark.parametrize("size", [2, 3])
def test_one_weird_trick_hybrid_trains_as_the_plain_network(size: int) -> None:
    torch.manual_seed(0)
    model = AlexNet().double()
    plan = one_weird_trick_plan(model, size=size)
    assert plan == {
        "features": "batch",
        "classifier.1": "output",
        "classifier.3": "input",
        "classifier.5": "output_gathered",
    }
    plain, workers = check_same(model, plan, size, Run(images(7, 1, 8, 8), num_steps=3))
    assert all(worker.num_held < plain.num_held for worker in workers)


@pytest.mark.parametrize(("size", "samples"), [(2, 4), (3, 4), (3, 2)])
def test_a_flat_sequence_is_split_in_the_middle_and_keeps_its_names(size: int, samples: int) -> None:
    model = flat()
    plan = one_weird_trick_plan(model, size=size)
    assert plan == {"0:5": "batch", "6": "output", "8": "input"}
    _, workers = check_same(model, plan, size, Run(images(samples, 1, 9, 9), num_steps=3))  # also fewer samples than T
    for worker in workers:
        assert list(worker.state) == list(model.state_dict())
        assert worker.split is not None
        assert worker.split.partial == {"0.weight", "1.weight", "1.bias", "4.weight", "4.bias"}


def test_the_plans_of_a_whole_network_pass_the_check_of_split_models() -> None:
    torch.manual_seed(0)
    model = AlexNet().double()
    inputs = images(4, 1, 8, 8)
    plans = [
        one_weird_trick_plan(model),
        spatial_plan(model),
        channels_plan(model),
        {"features.0:4": "height", "features.5:7": "batch"},
        {"features": "width", "classifier.*": "whole"},
    ]

    def worker(collective: Collective) -> None:
        for plan in plans:
            local = copy.deepcopy(model)
            split_model(local, plan, lambda: collective, collective.rank, collective.size, example=inputs)
            assert list(local.state_dict()) == list(model.state_dict())

    run_replicas(2, worker)


def test_batch_norm_of_synchronized_replicas_sees_the_samples_of_all_workers() -> None:
    """Compare two replicas of two workers each, with statistics over all four, with one process and the whole batch."""
    model, inputs = flat()[:5], images(8, 1, 9, 9)
    model[3] = nn.Identity()
    plain = copy.deepcopy(model)
    expected = plain(inputs)
    expected.square().sum().backward()

    def worker(world: Collective) -> None:
        replica, rank = divmod(world.rank, 2)
        tensor = world.subgroup(f"tensor-{replica}", [2 * replica, 2 * replica + 1])
        data = world.subgroup(f"data-{rank}", [rank, rank + 2])
        local = synchronize(copy.deepcopy(model), lambda: data)
        split_model(local, {"": "batch"}, lambda: tensor, rank, 2)
        # Unlike shares: 5 and 3 samples, of which the workers of a replica get 3 and 2, 2 and 1.
        share = slice(0, 5) if replica == 0 else slice(5, 8)
        outputs = local(inputs[share])
        assert torch.allclose(outputs, expected[share], rtol=1e-12, atol=1e-12)
        outputs.square().sum().backward()
        for parameter, whole in zip(local.parameters(), plain.parameters(), strict=True):
            assert parameter.grad is not None
            assert whole.grad is not None
            world.all_reduce(parameter.grad)
            assert torch.allclose(parameter.grad, whole.grad, rtol=1e-12, atol=1e-11)
        assert torch.allclose(local[1].running_var, plain[1].running_var, rtol=1e-12)

    run_replicas(4, worker)


def test_a_pass_without_samples_of_a_replica_that_normalises_apart_leaves_the_statistics_alone() -> None:
    model = flat()[:5]

    def worker(collective: Collective) -> None:
        local = copy.deepcopy(model)
        split_model(local, {"": "batch"}, lambda: collective, collective.rank, 2)
        local(images(0, 1, 9, 9)).sum().backward()
        assert all(parameter.grad is not None and not parameter.grad.any() for parameter in local.parameters())
        assert torch.equal(local[1].running_var, model[1].running_var)

    run_replicas(2, worker)


def test_one_weird_trick_sends_less_than_data_parallelism_and_than_model_parallelism_alone() -> None:
    """Check shapes in AlexNet's proportions: 5% of the weights and most of the activations are convolutional.

    Data parallelism adds up every gradient; splitting all layers sends activations at every convolution. The trick adds
    up the convolutions' gradients and gathers activations once.
    """
    size, samples, side = 2, 8, 16
    torch.manual_seed(0)
    features = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4)]
    classifier = [nn.Flatten(), nn.Linear(12 * 16, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)]
    model = of(*features, *classifier)
    num_convolutional = sum(parameter.numel() for parameter in model[:5].parameters())
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    assert num_convolutional < 0.05 * num_weights

    def sent(plan: dict[str, str]) -> int:
        run = Run(images(samples, 3, side, side), num_steps=1, inputs_need_gradient=False)
        worker = train_split(model, plan, size, run)[0]
        assert worker.split is not None
        partial = sum(worker.state[name].numel() for name in worker.split.partial)
        return worker.bytes_sent + ring(partial)

    def ring(num_elements: int) -> int:
        return 2 * (size - 1) * 8 * num_elements // size

    trick = sent(one_weird_trick_plan(model, size=size))
    assert trick < ring(num_weights)  # data parallelism
    assert trick < sent(channels_plan(model, size=size))  # model parallelism


# -- where the convolutional part is -----------------------------------------------------------------------------------


def test_the_convolutional_part_is_found() -> None:
    assert convolutional_part(AlexNet())[0] == "features"
    assert convolutional_part(flat())[0] == "0:5"
    nested = of(of(nn.Conv2d(1, 1, 1), nn.ReLU()), nn.Flatten(), nn.Linear(1, 1))
    assert convolutional_part(nested)[0] == "0"
    deeper = of(of(nn.Conv2d(1, 1, 1), nn.ReLU(), nn.Flatten()), nn.Linear(1, 1))
    assert convolutional_part(deeper)[0] == "0.0:2"
    assert convolutional_part(of(nn.Conv2d(1, 1, 1), nn.ReLU()))[0] == "0:2"
    with pytest.raises(ConfigError, match="begins with no convolutions"):
        convolutional_part(of(nn.Linear(1, 1)))
    with pytest.raises(ConfigError, match="has no convolutions, which this plan splits"):
        convolutional_part(nn.TransformerEncoderLayer(4, 2))


def test_the_spatial_plan_goes_as_far_as_rows_suffice() -> None:
    relu = nn.ReLU()
    layers = [nn.Conv2d(1, 2, 3, padding=1), relu, nn.MaxPool2d(2), nn.Conv2d(2, 2, 3, padding=1), relu]
    model = of(*layers, nn.MaxPool2d(2), nn.Dropout(0.1), nn.Flatten(), nn.Linear(8, 2))
    assert spatial_plan(model)["0:6"] == "height"
    assert spatial_plan(model, size=2, example=images(1, 1, 8, 8))["0:6"] == "height"
    # The last pooling leaves two rows for three workers, and the activation before it is used elsewhere too.
    assert spatial_plan(model, size=3, example=images(1, 1, 8, 8))["0:4"] == "height"
    with pytest.raises(ConfigError, match="too few"):
        spatial_plan(model, size=9, example=images(1, 1, 8, 8))
    flat_images = of(nn.Conv1d(1, 2, 3), nn.ReLU(), nn.Flatten())
    assert spatial_plan(flat_images) == {"0:2": "width"}
    check_same(model, spatial_plan(model, size=3, example=images(1, 1, 8, 8)), 3, Run(images(2, 1, 8, 8)))


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        *(("cnn", kind) for kind in ("channels", "spatial", "one_weird_trick")),
        *(("inception", kind) for kind in ("channels", "spatial", "one_weird_trick", "branches")),
        *(("alexnet", kind) for kind in ("channels", "spatial", "one_weird_trick", "branches")),
    ],
)
def test_the_built_in_networks_train_by_every_plan_as_in_one_process(model: str, kind: str) -> None:
    torch.manual_seed(0)
    plain = Digits({"cnn": [4, 6], "inception": [4, 8], "alexnet": [16, 8]}[model], model=model, dropout=0.2)
    network, inputs = plain.build_model().double(), images(5, 1, 8, 8)
    plan = make_plan(None, network, kind, 2, inputs)  # type: ignore[arg-type]
    assert any(style in plan.values() for style in ("channels_in", "height", "branches", "batch"))
    check_same(network, plan, 2, Run(inputs), close=1e-11)


def test_blocks_of_branches_are_found() -> None:
    from orchestray.trainers.parallel.tensor.branches import Branches

    towers = Branches([nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU()) for _ in range(2)])
    assert branches_plan(of(nn.Conv2d(1, 1, 1), towers, nn.Flatten())) == {"1": "branches"}
    with pytest.raises(ConfigError, match="found no block"):
        branches_plan(flat())


# -- what cannot be split ----------------------------------------------------------------------------------------------


def refused(model: nn.Module, plan: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        train_split(model, plan, 2, Run(images(4, 1, 9, 9), num_steps=1))
    return str(caught.value)


def test_what_cannot_be_split_by_samples_is_refused() -> None:
    assert "random numbers cannot be split" in refused(of(nn.RReLU(), nn.Conv2d(1, 1, 1)), {"": "batch"})
    assert "a row for each sample" in refused(of(nn.Flatten(0)), {"": "batch"})
    assert "is no range of children" in refused(flat(), {"a:b": "batch"})
    relu = nn.ReLU()
    assert "called several times" in refused(of(relu, nn.Conv2d(1, 1, 1), relu), {"0:2": "batch"})
    assert "twice" in refused(flat(), {"0:5": "batch", "4": "channels_gathered"})
