"""A step that does not fit into the GPU's memory ends the run with a sentence, and the next run starts clean."""

from __future__ import annotations

from gpu.check import Place, Verdict, main

_ALLOWED_BYTES = 2 * 10**9
"""Memory that this process may take of the GPU: the model is drawn in the host's, which may be smaller."""


def run(place: Place) -> Verdict:
    """Train as usual, then with a layer that cannot be held, and as usual once more in the same process."""
    import gc

    import torch

    from gpu import training
    from orchestray.platform.errors import OrchestrayError

    device = place.device()
    training.trained(training.replica_of(training.DIGITS, device, steps=1))  # cuBLAS keeps a workspace from then on
    gc.collect()
    before = 0 if place.is_rehearsal else torch.cuda.memory_allocated(device)
    sentence = ""
    try:
        if place.is_rehearsal:
            replica = training.replica_of(training.DIGITS, device, steps=1)
            replica.model.register_forward_pre_hook(_fail)
        else:
            most = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(_ALLOWED_BYTES / most, device)
            width = int((0.6 * _ALLOWED_BYTES / 4) ** 0.5)  # its weights fit, their gradients do not
            replica = training.replica_of({"type": "digits", "hidden": [width, width]}, device, steps=1)
        training.trained(replica)
    except OrchestrayError as error:
        sentence = str(error).partition("\n")[0]
    except torch.OutOfMemoryError as error:
        return Verdict(False, f"torch's own error came through: {str(error).partition('.')[0]}")
    replica = None  # type: ignore[assignment]
    gc.collect()
    if not place.is_rehearsal:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    left = 0 if place.is_rehearsal else torch.cuda.memory_allocated(device) - before
    losses = training.trained(training.replica_of(training.DIGITS, device, steps=3))
    holds = "memory" in sentence and len(losses) == 3 and left <= 2**20
    return Verdict(holds, f'"{sentence}"; {left} bytes are left (<= 1 MiB), the next run has {len(losses)} steps (= 3)')


def _fail(*_: object) -> None:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")


if __name__ == "__main__":
    main(run)
