"""Two processes that split a small network as PyTorch's own DTensor does: `dtensor_peer.py DIRECTORY`.

Each leaves in DIRECTORY what its rank holds, the output, and how many collective operations the forward pass took.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

WIDTHS = (6, 16, 10)
SAMPLES = 5


def make() -> nn.Sequential:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(*WIDTHS[:2]), nn.GELU(), nn.Linear(*WIDTHS[1:])).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
    return model


def inputs() -> Tensor:
    return torch.randn(SAMPLES, WIDTHS[0], dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def main(directory: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.set_num_threads(1)
    other = os.fork()  # once all is imported
    rank = 0 if other else 1
    dist.init_process_group("gloo", init_method=(directory / "meet").as_uri(), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    model = parallelize_module(make(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    counted = CommDebugMode()
    with counted:
        y = model(inputs())
    y = y + 0  # DTensor gives what it waits for when it is used
    (y**2).sum().backward()
    held = {"output": y.detach().clone()}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert isinstance(parameter.grad, DTensor)
        held[name] = parameter.to_local().detach().contiguous()
        held[f"{name}.grad"] = parameter.grad.to_local().contiguous()
    counts = {str(operation): number for operation, number in counted.get_comm_counts().items()}
    (directory / f"rank-{rank}.json").write_text(json.dumps(counts), encoding="utf-8")
    save_file(held, directory / f"rank-{rank}.safetensors")
    dist.destroy_process_group()
    if other:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
