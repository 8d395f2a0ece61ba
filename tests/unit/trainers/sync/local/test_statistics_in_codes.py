"""Statistics of batch normalisation among replicas that tell their moves in a code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from orchestray.platform.comm.flat_tensors import FlatTensors
from orchestray.trainers.sync.local.delta_encoding import DifferenceCode
from support.layouts import layout_settings, train_laid_out
from support.training import few_digits

CODES = [{"type": "topk", "ratio": 0.05, "error_feedback": True}, {"type": "onebit", "error_feedback": True}]


def task() -> Any:
    return few_digits(batch_norm=True)


@pytest.mark.parametrize(  # each exchange and each code: the exchange alone says what is coded
    ("exchange", "code"),
    [
        ({"type": "averaging", "every": 5}, CODES[0]),
        ({"type": "gossip", "graph": "complete"}, CODES[0]),
        ({"type": "elastic_averaging", "every": 2}, CODES[1]),
        ({"type": "elastic_averaging", "every": 2, "consistency": "asynchronous"}, CODES[0]),
    ],
    ids=lambda section: "-".join(map(str, section.values())),
)
def test_they_stay_what_was_measured(exchange: dict[str, Any], code: dict[str, Any]) -> None:
    """Check that no variance falls below zero, as it would if a code kept its moves back and sent them later."""
    settings = layout_settings({"data": 2}, exchange, steps=30, batch_norm="local")
    plain, found = (train_laid_out(task, each) for each in (settings, replace(settings, compression=code)))
    variances = [name for name in found.weights if name.endswith("running_var")]
    assert len(variances) == 2
    for name in variances:
        assert float(found.weights[name].min()) > 0
        assert float((found.weights[name].log().mean() - plain.weights[name].log().mean()).abs()) < 1.5


@pytest.mark.parametrize("code", CODES, ids=lambda code: code["type"])
def test_what_a_code_is_told_to_leave_alone_arrives_as_it_was(code: dict[str, Any]) -> None:
    tensors = [torch.randn(16, 9), torch.randn(21).double(), torch.randn(3, 2), torch.randn(5)]
    flat = FlatTensors(tensors)
    chosen = DifferenceCode(code, flat, seed=0, worker=0, num_workers=2, exact=[1, 2])
    message = chosen.encode(flat.pack(), 1)
    told = flat.views(chosen.decode(message))
    assert torch.equal(told[1], tensors[1])
    assert torch.equal(told[2], tensors[2])
    assert not torch.equal(told[0], tensors[0])
    assert chosen.message_bytes in (None, message.numel())
    assert chosen.dense_bytes == sum(tensor.nbytes for tensor in tensors)
