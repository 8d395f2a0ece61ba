"""`train.recompute` blocks and sqrt: the gradients of a plain step, and the memory that the meter predicts."""

from __future__ import annotations

from gpu.check import Place, Verdict, main

_BOUND = 0.03


def run(place: Place) -> Verdict:
    """Compare a step of a deep transformer with and without, and torch's peak with the prediction."""
    import copy

    import torch

    from gpu import training
    from orchestray.trainers.core.arithmetic import Arithmetic
    from orchestray.trainers.parallel.recompute.choose import recompute
    from orchestray.trainers.parallel.recompute.meter import ActivationMeter

    Arithmetic(deterministic=True).apply()  # attention's backward pass in float32 is not, by itself
    device = place.device()
    size = {"context": 512, "width": 768, "depth": 24, "heads": 12} if not place.is_rehearsal else {}
    task = training.resolve_task({**training.TEXT, "depth": 4, **size})
    torch.manual_seed(0)
    plain = task.build_model().to(device)
    context = size.get("context", 64)
    inputs = torch.randint(0, 256, (place.sized(16, 2), context), device=device)
    grads, peaks, predicted = {}, {}, {}
    for how in ("none", "blocks", "sqrt"):
        model = copy.deepcopy(plain)
        meter = ActivationMeter(model)
        recompute(model, how, meter=meter, inputs=lambda: inputs)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        before = _allocated(device)
        with meter.watching(inputs):
            model(inputs).float().logsumexp(-1).mean().backward()
        peaks[how] = _peak(device) - before
        predicted[how] = meter.peak_bytes
        grads[how] = {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}
        del model
    same = all(torch.equal(grads["none"][name], each[name]) for each in grads.values() for name in each)
    spared = all(predicted[how] < predicted["none"] for how in ("blocks", "sqrt"))
    if place.is_rehearsal:
        return Verdict(same and spared, f"same gradients: {same}; predicted bytes {predicted}")
    saved = {how: peaks["none"] - peaks[how] for how in ("blocks", "sqrt")}
    off = max(abs(saved[how] / (predicted["none"] - predicted[how]) - 1) for how in saved)
    return Verdict(
        same and off <= _BOUND,
        f"same gradients: {same}; bytes spared are {off:.1%} off the prediction (<= {_BOUND:.0%}), peaks {peaks}",
    )


def _allocated(device: object) -> int:
    """Return the bytes that are allocated, and forget the peak so far."""
    import torch

    if str(device) == "cpu":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak(device: object) -> int:
    """Return the most bytes that were allocated since `_allocated`."""
    import torch

    if str(device) == "cpu":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


if __name__ == "__main__":
    main(run)
