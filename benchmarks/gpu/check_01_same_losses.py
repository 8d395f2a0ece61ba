"""Trainings on a GPU have the losses of the CPU: digits and python_source, 50 steps, float32, no TF32."""

from __future__ import annotations

from gpu.check import Place, Verdict, main

_BOUND = 1e-3


def run(place: Place) -> Verdict:
    """Compare the losses of each step, and hold the largest difference at 1e-3."""
    import torch

    from gpu import training

    steps = place.sized(50, 4)
    worst = {}
    for name, task in (("digits", training.DIGITS), ("python_source", training.TEXT)):
        losses = [
            training.trained(training.replica_of(task, device, steps=steps))
            for device in (torch.device("cpu"), place.device())
        ]
        assert len(losses[0]) == steps
        worst[name] = training.largest_difference(*losses)
    figures = ", ".join(f"{name} {value:.1e}" for name, value in worst.items())
    return Verdict(max(worst.values()) <= _BOUND, f"largest difference {figures} (<= {_BOUND:g})")


if __name__ == "__main__":
    main(run)
