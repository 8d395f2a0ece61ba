"""bfloat16 by autocast: after 200 steps the loss is within 1 % of float32's, and the optimizer's state is float32."""

from __future__ import annotations

from gpu.check import Place, Verdict, main

_BOUND = 0.01


def run(place: Place) -> Verdict:
    """Train twice, and compare the mean loss of the last ten steps."""
    import torch

    from gpu import training

    steps, losses, dtypes = place.sized(200, 12), [], set()
    for precision in ("float32", "bfloat16"):
        optimizer = {"type": "adamw", "lr": 1e-3}
        replica = training.replica_of(
            training.TEXT, place.device(), steps=steps, precision=precision, optimizer=optimizer
        )
        found = training.trained(replica)
        losses.append(sum(list(found.values())[-10:]) / 10)
        state = replica.optimizer.state_tensors()
        dtypes |= {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
    apart = abs(losses[1] / losses[0] - 1)
    names = ", ".join(sorted(str(each) for each in dtypes))
    holds = apart <= _BOUND and dtypes == {torch.float32}
    return Verdict(holds, f"losses differ by {apart:.3%} (<= {_BOUND:.0%}), state in {names} (= torch.float32)")


if __name__ == "__main__":
    main(run)
