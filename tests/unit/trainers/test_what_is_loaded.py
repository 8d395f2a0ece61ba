"""Modules that training does not load unasked: compilers, other frameworks, and what is slow to import."""

from __future__ import annotations

import pytest

from support.fresh import loaded_after

COMPILERS = {"torch._dynamo", "torch._inductor", "sympy"}
SHARDING = {"torch.distributed.fsdp", "torch.distributed.tensor"}

STEPS: dict[str, tuple[str, set[str]]] = {
    "digits": (
        (
            "from orchestray.trainers.tasks.digits import Digits\n"
            "Digits().dataset('train')\n"
            "Digits(model='cnn').build_model()\n"
        ),
        {"sklearn", "orchestray.trainers.parallel.tensor"},
    ),
    "exchanges": ("import orchestray.trainers.sync\n", {*SHARDING, "torch._dynamo", "ray"}),
    "optimizers": (
        (
            "import torch\n"
            "from orchestray.platform.comm.solo import SoloCollective\n"
            "from orchestray.trainers.core import batch_norm, weights\n"
            "from orchestray.trainers.optim import factory, schedules\n"
            "from orchestray.trainers.sync.allreduce.allreduce import AllReduce\n"
            "for kind in factory.OPTIMIZERS:\n"
            "    if kind == 'muon':\n"  # a class of torch.optim, which are made for its compiler
            "        continue\n"
            "    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))\n"
            "    batch_norm.synchronize(model, SoloCollective)\n"
            "    optimizer = factory.make_optimizer(kind)\n"
            "    optimizer.prepare(model)\n"
            "    optimizer.observe(model, {})\n"
            "    optimizer.init(model.named_parameters())\n"
            "    optimizer.join(SoloCollective())\n"
            "    step = AllReduce()\n"
            "    step.attach(model, SoloCollective())\n"
            "    step.before_step(1)\n"
            "    optimizer.begin_step(1, 3, 3)\n"
            "    step.begin_backward(True)\n"
            "    model(torch.randn(3, 2)).sum().backward()\n"
            "    step.finish([])\n"
            "    params = list(model.parameters())\n"
            "    optimizer.step(params, [p.grad for p in params], 0.1)\n"
        ),
        COMPILERS,
    ),
    "recomputation": (
        (
            "import torch\n"
            "from torch import nn\n"
            "from orchestray.trainers.parallel.recompute import ActivationMeter, recompute\n"
            "model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(9)))\n"
            "recompute(model, 'sqrt')\n"
            "with ActivationMeter(model).watching():\n"
            "    model(torch.ones(1, 2)).sum().backward()\n"
        ),
        {*COMPILERS, "ray"},
    ),
    "draws": (
        (
            "import torch\n"
            "from torch import nn\n"
            "from orchestray.trainers.parallel.tensor.unseeded_rng import own_draws\n"
            "assert own_draws(nn.Sequential(nn.RReLU()), torch.ones(1, 2))\n"
        ),
        {*COMPILERS, "ray"},
    ),
    "pipeline": (
        (
            "import orchestray.trainers.parallel.pipeline.cutting, orchestray.trainers.parallel.pipeline.profile\n"
            "import orchestray.trainers.parallel.pipeline.balance\n"
        ),
        {"ray"},
    ),
}
"""Steps, one after the other, and the modules and packages that are not loaded after each."""


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    return loaded_after({name: code for name, (code, _) in STEPS.items()})


@pytest.mark.parametrize("step", STEPS)
def test_what_is_not_asked_for_is_not_loaded(loaded: dict[str, set[str]], step: str) -> None:
    unwanted = STEPS[step][1]
    assert {module for module in loaded[step] if any(f"{module}.".startswith(f"{one}.") for one in unwanted)} == set()
