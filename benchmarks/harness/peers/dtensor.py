"""The peer of tensor parallelism: the same training under `torchrun` with DTensor's `parallelize_module` over gloo.

Usage: torchrun --nproc-per-node N dtensor.py SPEC.json OUT.json

With one process it is the plain model. DTensor splits rows evenly, so the transformer's packed projection of queries,
keys and values is three layers here, of the same weights.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from harness.peers.plain import Plain


class Separate(nn.Module):
    """A block of the built-in transformer with a layer each for queries, keys and values; numbers are the same."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        packed: Any = block.query_key_value
        rows = zip(packed.weight.detach().chunk(3), packed.bias.detach().chunk(3), strict=True)
        self.query, self.key, self.value = (_linear(weight, bias) for weight, bias in rows)
        self.head_width: Any = block.head_width
        for name in ("attention_norm", "attention_output", "feed_forward_norm", "feed_forward_input"):
            setattr(self, name, getattr(block, name))
        self.feed_forward_output = block.feed_forward_output

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        query, key, value = (
            layer(y).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_output(mixed.transpose(1, 2).flatten(2))
        hidden = functional.gelu(self.feed_forward_input(self.feed_forward_norm(x)))
        output: Tensor = x + self.feed_forward_output(hidden)
        return output


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight, layer.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
    return layer


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    dist.init_process_group("gloo")
    plain = Plain(spec)
    plain.order_as_ours(spec["steps"])
    model = plain.model
    if dist.get_world_size() > 1:
        model = parallelized(model, spec["model"], dist.get_world_size())
    optimizer = plain.optimizer(model)
    times, losses = [], []
    # Every rank has the whole batch.
    for step, loss in plain.steps(model, optimizer, rank=0, num_ranks=1):
        times.append(time.time())
        losses.append(loss)
        if step == spec["steps"]:
            break
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps({"times": times, "losses": losses}), encoding="utf-8")
    dist.barrier()
    os._exit(0)  # gloo's threads abort some regular exits


def parallelized(model: nn.Module, kind: str, size: int) -> nn.Module:
    """Split pairs of layers by rows, then by columns; a lone one by rows, gathered."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {}
    if kind == "mlp":
        layers = [name for name, layer in model.named_children() if isinstance(layer, nn.Linear)]
        for first, second in zip(layers[::2], layers[1::2], strict=True):
            plan.update({first: ColwiseParallel(), second: RowwiseParallel()})
    else:
        parts = list(model.children())
        model = nn.Sequential(parts[0], *(Separate(block) for block in parts[1:-2]), *parts[-2:])
        for index in range(1, len(parts) - 2):
            rows = ("query", "key", "value", "feed_forward_input")
            plan.update({f"{index}.{name}": ColwiseParallel() for name in rows})
            columns = ("attention_output", "feed_forward_output")
            plan.update({f"{index}.{name}": RowwiseParallel() for name in columns})
        plan[str(len(parts) - 1)] = ColwiseParallel(output_layouts=Replicate())
    made: nn.Module = parallelize_module(model, init_device_mesh("cpu", (size,)), plan)
    return made


if __name__ == "__main__":
    main()
