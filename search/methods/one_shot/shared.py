"""Spaces whose networks are all parts of one network, which has their shared weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from orchestray.platform.errors import ConfigError
from orchestray.search.spaces.registry import OwnSpace

if TYPE_CHECKING:
    from torch import Tensor

    from orchestray.search.spaces.architectures.base import ArchitectureSpace, Genome


class SuperNet(Protocol):
    """A module that contains all networks of a space: called with inputs and a genome it acts as that network."""

    def __call__(self, inputs: Tensor, genome: Genome) -> Tensor:
        """Return the outputs of one network."""

    def child_state(self, genome: Genome) -> dict[str, Tensor]:
        """Return copies of a network's weights, by their names in the network that the space builds."""


class MixedSuperNet(SuperNet, Protocol):
    """A super-network that can also compute the weighted mixture of all its networks."""

    @property
    def alpha_shapes(self) -> Mapping[str, tuple[int, int]]:
        """Names and shapes of the weights of operations."""

    def forward_mixed(self, inputs: Tensor, alphas: Mapping[str, Tensor]) -> Tensor:
        """Return the outputs of the mixture, weighted by the softmax of each row of `alphas`."""

    def genome_of_alphas(self, alphas: Mapping[str, Tensor]) -> Genome:
        """Return the network with the largest weights."""


@runtime_checkable
class SharedSpace(Protocol):
    """A space that has a super-network."""

    def supernet(self, input_shape: Sequence[int], num_outputs: int) -> Any:
        """Return the super-network: a `SuperNet`, for `darts` a `MixedSuperNet`."""


def check_shared(architecture: ArchitectureSpace | None, method: str) -> None:
    """Refuse a space whose networks do not share weights.

    Args:
        architecture: the space.
        method: name of the method, for errors.

    Raises:
        ConfigError: the space has no method `supernet`.
    """
    own = architecture.space if isinstance(architecture, OwnSpace) else architecture
    if not isinstance(own, SharedSpace):
        raise ConfigError(
            f"search.architecture.space: the method {method} trains all networks as parts of one, and "
            f"{type(own).__name__} has none. Take the space cell, or give your own space a method "
            "'supernet(input_shape, num_outputs)' (orchestray.search.methods.one_shot.shared says what it returns); "
            "regularized_evolution needs none."
        )
