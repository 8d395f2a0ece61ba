"""The section of solvers, as a union of the classes in the registry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.trainers.solvers.registry import SOLVERS

if TYPE_CHECKING:
    from orchestray.trainers.solvers.params import (
        Admm,
        Bfgs,
        ConjugateGradient,
        HessianFree,
        Lbfgs,
        LevenbergMarquardt,
        Neumann,
        Newton,
        Stacking,
        StochasticLbfgs,
        Svrg,
    )

    Solver = (
        ConjugateGradient
        | Bfgs
        | Lbfgs
        | Newton
        | LevenbergMarquardt
        | HessianFree
        | StochasticLbfgs
        | Svrg
        | Admm
        | Stacking
        | Neumann
    )
else:
    Solver = SOLVERS.union()
