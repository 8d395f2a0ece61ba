"""A step of a GPT-124M-sized transformer in bfloat16 costs what it does in a bare loop, and waits for the GPU once."""

from __future__ import annotations

import statistics
import time
from typing import Any

from gpu.check import Place, Verdict, main

_BOUND, _MOST_WAITS = 1.01, 1.0
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def run(place: Place) -> Verdict:
    """Time both in turns after a warm-up, then count in traces how often the CPU waits."""
    from gpu import training

    device = place.device()
    size = {"context": 1024, "width": 768, "depth": 12, "heads": 12}
    task = {**training.TEXT, **({} if place.is_rehearsal else size)}
    steps, rounds = place.sized(20, 3), place.sized(3, 1)
    ours = _Ours(task, device, place.sized(8, 2))
    bare = _Bare(task, device, ours.batches)
    ours.run(place.sized(5, 1)), bare.run(place.sized(5, 1))
    times = [(ours.run(steps), bare.run(steps)) for _ in range(rounds)]
    waits = (_waits(ours, 2 * steps) - _waits(ours, steps)) / steps
    ratio = statistics.median(mine / other for mine, other in times)
    holds = place.is_rehearsal or (ratio <= _BOUND and waits <= _MOST_WAITS)
    per_s = steps / statistics.median(mine for mine, _ in times)
    return Verdict(
        holds,
        f"{per_s:.1f} steps/s, {ratio:.3f} x a bare loop's step (<= {_BOUND:g} x), "
        f"the CPU waits {waits:.2f} times a step (<= {_MOST_WAITS:g})",
    )


def _waits(ours: _Ours, steps: int) -> int:
    """Return how often the CPU waits in a trace of this many steps, and at the ends of the run and of the trace.

    The ends wait as often whatever is between them, so two lengths tell what a step does.
    """
    from gpu import trace

    with trace.tracing() as traced:
        ours.run(steps)
    return sum(trace.calls(traced, name) for name in _WAITS)


class _Ours:
    """The product's loop, run some steps at a time."""

    def __init__(self, task: dict[str, Any], device: Any, batch_size: int) -> None:
        from gpu import training
        from orchestray.platform.comm.solo import SoloCollective

        self._recorder = training.Timed()
        optimizer = {"type": "adamw", "lr": 3e-4}
        precision = {"precision": "bfloat16"} if device.type == "cuda" else {}
        self._replica = training.replica_of(
            task, device, recorder=self._recorder, batch_size=batch_size, steps=10**6, optimizer=optimizer, **precision
        )
        self._replica.connect(SoloCollective())
        shares = self._replica.stream("train").epoch(0)
        self.batches = [share.micro_batches[0].batch for share, _ in zip(shares, range(8), strict=False)]

    def run(self, steps: int) -> float:
        """Return the seconds of this many steps, without the validation that ends them."""
        first = self._replica.position.step + 1
        self._replica.pause_at = self._replica.position.step + steps + 1
        self._replica.run(time.time())
        at_s = self._recorder.at_s
        return at_s[first + steps] - at_s[first]


class _Bare:
    """A loop as a user would write it."""

    def __init__(self, task: dict[str, Any], device: Any, batches: list[Any]) -> None:
        import torch

        from gpu import training

        self._task, self._device = training.resolve_task(task), device
        self._model = self._task.build_model().to(device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=3e-4, fused=device.type == "cuda")
        pin = device.type == "cuda"
        self._batches = [{k: v.pin_memory() if pin else v for k, v in batch.items()} for batch in batches]

    def run(self, steps: int) -> float:
        """Return the seconds of this many steps."""
        import torch

        is_gpu = self._device.type == "cuda"
        if is_gpu:
            torch.cuda.synchronize(self._device)
        began_s = time.perf_counter()
        for step in range(steps):
            given = self._batches[step % len(self._batches)]
            batch = {name: value.to(self._device, non_blocking=True) for name, value in given.items()}
            with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=is_gpu):
                loss = self._task.loss(self._model(batch["inputs"]), batch)
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
        if is_gpu:
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - began_s


if __name__ == "__main__":
    main(run)
