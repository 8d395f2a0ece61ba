"""The modes of modules: what a user has put into evaluation mode stays in it, and a validation leaves no trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


def begin_training(model: nn.Module) -> nn.Module:
    """Put a model that was just built into training mode, except what the user has put into evaluation mode.

    Returns:
        The same model.
    """
    chosen = [module for module in model.modules() if not module.training]
    model.train()  # a module may do more in its own `train` than set the flag
    for module in chosen:
        module.training = False
    return model


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode inside the context, and each back into its own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)  # LoRA, for one, takes its weights apart again here
        for module, mode in modes:
            module.training = mode
