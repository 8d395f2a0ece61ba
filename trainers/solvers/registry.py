"""Solvers by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.platform.config.registry import Registry

if TYPE_CHECKING:
    from orchestray.trainers.solvers.params import SolverSection

_HERE = "orchestray.trainers.solvers"
_PARAMS = f"{_HERE}.params"

SOLVERS: Registry[SolverSection] = Registry(
    "train.solver",
    {
        "conjugate_gradient": (f"{_PARAMS}:ConjugateGradient", f"{_HERE}.conjugate_gradient:ConjugateGradient"),
        "bfgs": (f"{_PARAMS}:Bfgs", f"{_HERE}.bfgs:Bfgs"),
        "lbfgs": (f"{_PARAMS}:Lbfgs", f"{_HERE}.lbfgs:Lbfgs"),
        "newton": (f"{_PARAMS}:Newton", f"{_HERE}.newton:Newton"),
        "levenberg_marquardt": (
            f"{_PARAMS}:LevenbergMarquardt",
            f"{_HERE}.levenberg_marquardt:LevenbergMarquardt",
        ),
        "hessian_free": (f"{_PARAMS}:HessianFree", f"{_HERE}.hessian_free:HessianFree"),
        "stochastic_lbfgs": (f"{_PARAMS}:StochasticLbfgs", f"{_HERE}.stochastic_lbfgs:StochasticLbfgs"),
        "svrg": (f"{_PARAMS}:Svrg", f"{_HERE}.svrg:Svrg"),
        "admm": (f"{_PARAMS}:Admm", f"{_HERE}.admm:Admm"),
        "stacking": (f"{_PARAMS}:Stacking", f"{_HERE}.stacking:Stacking"),
        "neumann": (f"{_PARAMS}:Neumann", f"{_HERE}.neumann:Neumann"),
    },
    noun="a solver",
)
