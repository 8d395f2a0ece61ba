"""A checkpoint of 2 GB while training: steps take at most 5 % longer, it is exact, and SIGKILL leaves an older one."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu.check import Place, Verdict, has_ray, main, num_gpus

_BOUND = 0.05


def tensors_of(device: Any, num_elements: int) -> dict[str, Any]:
    """Return 16 tensors with `num_elements` elements in all."""
    import torch

    return {f"layer.{index}": torch.zeros(num_elements // 16, device=device) for index in range(16)}


def train(tensors: dict[str, Any], writer: Any, steps: int, work: Any) -> float:
    """Compute, then add 1 to each tensor, `steps` times; return the seconds."""
    began_s = time.perf_counter()
    for _ in range(steps):
        for _ in range(8):
            work.copy_(work @ work).clamp_(-1, 1)
        writer.wait_copied()
        for tensor in tensors.values():
            tensor.add_(1)
    if work.is_cuda:
        import torch

        torch.cuda.synchronize(work.device)
    return time.perf_counter() - began_s


def save_for_ever(directory: str, device: str, num_elements: int) -> None:
    """Write checkpoints whose tensors are equal to their step, until killed."""
    import torch

    from orchestray.platform.run.checkpoint import CheckpointWriter

    tensors, work = tensors_of(torch.device(device), num_elements), torch.zeros(64, 64, device=device)
    with CheckpointWriter(directory, keep=2) as writer:
        for step in range(1, 10**6):
            train(tensors, writer, 1, work)
            writer.save_async(step, tensors, {}, {"step": step})


def resumed(place: Place) -> str:
    """Kill a worker under `engine: ray_train`; return whether the run ends with the weights of one without a loss."""
    if place.has_threads or not has_ray():
        return "not tried without Ray"
    import torch

    from gpu import cluster
    from orchestray.platform.run.model_files import load_model_tensors

    steps, every, killed_at = (place.sized(*each) for each in ((6000, 600), (200, 20), (5000, 500)))
    workers = place.sized(min(2, num_gpus()), 2)
    config = cluster.config_of("whole", steps, gpus=place.sized(1, 0), data=workers)
    config |= {"engine": "ray_train", "checkpoint": {"every_steps": every}}
    config["train"]["deterministic"] = True
    faults = [{"kill": f"worker/{workers - 1}", "at_step": killed_at}]
    with tempfile.TemporaryDirectory() as directory:
        runs = [config, config | {"name": "killed", "allow_faults": True, "faults": faults}]
        for each in runs:
            cluster.train(Path(directory), each)
        whole, killed = (load_model_tensors(Path(directory) / str(each["name"]) / "model") for each in runs)
        assert cluster.num_restarts(Path(directory) / "killed") == 1
    return str(all(torch.equal(whole[name], killed[name]) for name in whole))


def run(place: Place) -> Verdict:
    """Time steps with and without a checkpoint; read it; kill a process that writes them, and read what is left."""
    import torch
    from torch import multiprocessing

    from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good, load_checkpoint

    device, num_elements = place.device(), place.sized(2**29, 2**16)
    steps = place.sized(300, 5)
    work = torch.rand(place.sized(4096, 64), place.sized(4096, 64), device=device)
    tensors = tensors_of(device, num_elements)
    with tempfile.TemporaryDirectory(dir=os.environ.get("CHECKPOINTS")) as directory:
        with CheckpointWriter(directory, keep=2) as writer:
            writer.prepare(tensors, {})
            writer.wait()
            train(tensors, writer, steps, work)
            plain_s = train(tensors, writer, steps, work)
            at = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
            writer.save_async(1, tensors, {}, {"step": 1})
            saving_s = train(tensors, writer, steps, work)
            writer.wait()
        found, _ = latest_good(directory)
        assert found is not None
        model, _, _ = load_checkpoint(found)
        is_exact = all(torch.equal(model[name], at[name]) for name in at)
        same = resumed(place)
        if place.is_rehearsal:
            return Verdict(is_exact and same != "False", f"exact: {is_exact}, the same weights by ray_train: {same}")
        killed = Path(directory) / "killed"
        child = multiprocessing.get_context("spawn").Process(
            target=save_for_ever, args=(str(killed), str(device), num_elements // 8)
        )
        child.start()
        deadline_s = time.monotonic() + 60
        while (not killed.is_dir() or latest_good(killed)[0] is None) and time.monotonic() < deadline_s:
            time.sleep(0.2)
        time.sleep(1.3)
        os.kill(int(child.pid or 0), signal.SIGKILL)
        child.join()
        left, _ = latest_good(killed)
        assert left is not None
        values, _, state = load_checkpoint(left)
        is_whole = all(bool((tensor == state["step"]).all()) for tensor in values.values())
    longer = saving_s / plain_s - 1
    return Verdict(
        longer <= _BOUND and is_exact and is_whole and same != "False",
        f"{longer:.1%} longer (<= {_BOUND:.0%}) over {plain_s:.0f} s, exact: {is_exact}, whole if killed: {is_whole}, "
        f"the same weights by ray_train: {same}",
    )


if __name__ == "__main__":
    main(run)
