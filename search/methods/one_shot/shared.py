"""Spaces all of whose networks are parts of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from orchestray.platform.errors import ConfigError
from orchestray.search.spaces.registry import OwnSpace

if TYPE_CHECKING:
    from torch import Tensor

    from orchestray.search.spaces.base import ArchitectureSpace, Genome


class SuperNet(Protocol):
    """A module that is all networks of a space: called with inputs and a genome it is that network."""

    def __call__(self, inputs: Tensor, genome: Genome) -> Tensor:
        """The outputs of one network."""

    def child_state(self, genome: Genome) -> dict[str, Tensor]:
        """Copies of a network's weights, by their names in the network that the space builds."""


class MixedSuperNet(SuperNet, Protocol):
    """One that is also all its networks at once, weighted."""

    @property
    def alpha_shapes(self) -> Mapping[str, tuple[int, int]]:
        """Names and shapes of the weights of operations."""

    def forward_mixed(self, inputs: Tensor, alphas: Mapping[str, Tensor]) -> Tensor:
        """The outputs of all networks by the softmax of each row of `alphas`."""

    def genome_of_alphas(self, alphas: Mapping[str, Tensor]) -> Genome:
        """The network that the weights speak for."""


@runtime_checkable
class SharedSpace(Protocol):
    """A space that has such a module."""

    def supernet(self, input_shape: Sequence[int], num_outputs: int) -> Any:
        """The module: a `SuperNet`, for `darts` a `MixedSuperNet`."""


def check_shared(architecture: ArchitectureSpace | None, method: str) -> None:
    """Refuse a space whose networks share no weights.

    Raises:
        ConfigError: it has no `supernet`.
    """
    own = architecture.space if isinstance(architecture, OwnSpace) else architecture
    if not isinstance(own, SharedSpace):
        raise ConfigError(
            f"search.architecture.space: the method {method} trains all networks as parts of one, and "
            f"{type(own).__name__} has none. Take the space cell, or give your own space a method "
            "'supernet(input_shape, num_outputs)' (orchestray.search.methods.one_shot.shared says what it returns); "
            "smash and regularized_evolution need none."
        )
