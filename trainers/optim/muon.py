"""Muon for the matrices of a network, AdamW for everything else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from orchestray.trainers.optim.adaptive import AdamW
from orchestray.trainers.optim.class_optimizer import ClassOptimizer
from orchestray.trainers.optim.grouped_optimizer import Group, GroupedOptimizer


class Muon(GroupedOptimizer):
    """`torch.optim.Muon` (Jordan et al. 2024): momentum SGD whose step of a matrix is made orthogonal.

    Matrices move by Muon, with the size of step that AdamW has, so that both take one rate (Liu et al. 2025, "Muon is
    Scalable for LLM Training", section 2.2). All other parameters, and matrices that `adamw` names, move by AdamW.
    """

    def __init__(
        self,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        ns_steps: int = 5,
        adamw: Sequence[str] = ("*embed*", "*head*"),
        betas: Sequence[float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        """
        Args:
            momentum: momentum of Muon.
            nesterov: True for Nesterov's momentum.
            weight_decay: part of the weights, times the rate, that is subtracted at each step, by both.
            ns_steps: number of Newton-Schulz iterations that make a step orthogonal.
            adamw: patterns of the names of matrices that move by AdamW.
            betas: decays of AdamW.
            eps: added to AdamW's denominator.
        """
        arguments = {
            "lr": 1.0,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "ns_steps": ns_steps,
            "adjust_lr_fn": "match_rms_adamw",
        }
        of_matrices = ClassOptimizer(torch.optim.Muon, arguments)
        super().__init__([Group("", of_matrices, 1.0), Group("*", AdamW(betas, eps, weight_decay), 1.0)])
        self._adamw = tuple(adamw)

    def init(self, named_params: Iterable[tuple[str, Tensor]]) -> None:
        named = list(named_params)
        self._chosen = [int(not self._is_matrix(name, parameter)) for name, parameter in named]
        super().init(named)

    def _group_of(self, index: int, name: str) -> int:
        return self._chosen[index]

    def _is_matrix(self, name: str, parameter: Tensor) -> bool:
        plain = self.first_names.get(name, name)
        is_real_matrix = parameter.ndim == 2 and not parameter.is_complex()
        return is_real_matrix and not any(fnmatchcase(plain, pattern) for pattern in self._adamw)
