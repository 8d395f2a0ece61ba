"""The parameters of solvers (`train.solver`)."""

from __future__ import annotations

from typing import ClassVar, Literal

from orchestray.platform.config.base import AboveZero, AtLeastZero, Count, Positive, Section

Curvature = Literal["gauss_newton", "hessian"]


class SolverSection(Section):
    """The keys that all solvers share, and facts about each."""

    needs_same_batch: ClassVar[bool] = False
    """True if what it learns in a step is wrong for another batch: each step has to see the whole data."""
    needs_whole_data: ClassVar[bool] = False
    """True if it passes over the whole data now and then, between steps on batches."""
    needs_curvature: ClassVar[bool] = False
    """True if it takes products with the Hessian or the Gauss-Newton matrix."""
    is_dense: ClassVar[bool] = False
    """True if it holds a number for each pair of parameters."""

    lr: AboveZero = 1.0
    """Factor on the step; of a solver with a line search, on the step that is tried first."""
    weight_decay: AtLeastZero = 0.0
    """L2 penalty: half of it, times the sum of the squared weights, is a part of what is minimised."""


class ConjugateGradient(SolverSection):
    """Nonlinear conjugate gradients (Polak and Ribiere, never negative) with a line search."""

    needs_same_batch, needs_curvature = True, True

    type: Literal["conjugate_gradient"]
    """The solver `conjugate_gradient`."""


class Bfgs(SolverSection):
    """BFGS: an approximation of the whole inverse Hessian, and a line search."""

    needs_same_batch, is_dense = True, True

    type: Literal["bfgs"]
    """The solver `bfgs`."""


class Lbfgs(SolverSection):
    """L-BFGS (Liu and Nocedal, 1989): BFGS from the last few steps."""

    needs_same_batch = True

    type: Literal["lbfgs"]
    """The solver `lbfgs`."""
    history: Positive = 10
    """Number of steps that are kept."""


class Newton(SolverSection):
    """Newton's method with the whole Hessian, made positive definite where it is not, and a line search."""

    needs_curvature, is_dense = True, True

    type: Literal["newton"]
    """The solver `newton`."""
    damping: AtLeastZero = 0.0
    """Number that is added to the Hessian's diagonal."""


class LevenbergMarquardt(SolverSection):
    """Levenberg-Marquardt: Gauss-Newton steps, damped until the loss falls; made for squared errors."""

    needs_curvature, is_dense = True, True

    type: Literal["levenberg_marquardt"]
    """The solver `levenberg_marquardt`."""
    damping: AboveZero = 1e-3
    """Damping of the first step, as a part of the diagonal."""


class HessianFree(SolverSection):
    """Hessian-free optimisation (Martens, 2010): damped Newton steps by conjugate gradients."""

    needs_curvature = True

    type: Literal["hessian_free"]
    """The solver `hessian_free`."""
    curvature: Curvature = "gauss_newton"
    """Matrix of the quadratic model."""
    damping: AtLeastZero = 1.0
    """Damping of the first step; later ones follow how well the model foretells the loss."""
    iterations: Positive = 50
    """Largest number of iterations of conjugate gradients in a step."""
    tolerance: AtLeastZero = 5e-4
    """Relative progress of an iteration below which they end."""


class Admm(SolverSection):
    """ADMM (Taylor et al., 2016): networks of fully connected layers by least squares, without a backward pass."""

    needs_same_batch = True

    type: Literal["admm"]
    """The solver `admm`."""
    beta: AboveZero = 0.1
    """Penalty on weighted sums that the weights do not give."""
    gamma: AboveZero = 1.0
    """Penalty on activations that are not those of the weighted sums."""
    warmup_steps: Count = 10
    """Number of steps before the multipliers of the last layer move."""


class Stacking(SolverSection):
    """Deep stacking networks (Deng and Yu, 2011): module by module, output weights by least squares."""

    needs_same_batch = True

    type: Literal["stacking"]
    """The solver `stacking`."""
    steps_per_module: Positive = 20
    """Number of steps before the next module is trained; the last one is trained to the end."""


class StochasticLbfgs(SolverSection):
    """Stochastic L-BFGS (Moritz et al., 2016): gradients of reduced variance, curvature by Hessian-vector products."""

    needs_whole_data, needs_curvature = True, True

    type: Literal["stochastic_lbfgs"]
    """The solver `stochastic_lbfgs`."""
    lr: AboveZero
    """Factor on the step."""
    history: Positive = 10
    """Number of pairs that are kept."""
    pair_every_steps: Positive = 10
    """Number of steps between two pairs."""
    anchor_every_steps: Positive | None = None
    """Number of steps between two passes over the whole data; null: an epoch."""


class Svrg(SolverSection):
    """SVRG (Johnson and Zhang, 2013): stochastic gradients, corrected by those at an anchor."""

    needs_whole_data = True

    type: Literal["svrg"]
    """The solver `svrg`."""
    lr: AboveZero
    """Learning rate."""
    anchor_every_steps: Positive | None = None
    """Number of steps between two passes over the whole data; null: an epoch."""


class Neumann(SolverSection):
    """Steps by a truncated Neumann series of the inverse Hessian (Krishnan et al., 2018)."""

    needs_curvature = True

    type: Literal["neumann"]
    """The solver `neumann`."""
    curvature: Curvature = "gauss_newton"
    """Matrix whose inverse is approximated."""
    terms: Positive = 10
    """Number of terms of the series."""
    damping: AtLeastZero = 1e-2
    """Number that is added to the matrix's diagonal."""
    power_iterations: Positive = 5
    """Products by which its largest eigenvalue is found."""
