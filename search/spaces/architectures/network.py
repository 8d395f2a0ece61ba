"""The PyTorch network of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt, prod

from torch import Tensor, nn

from orchestray.platform.errors import ConfigError
from orchestray.search.spaces.architectures import operations
from orchestray.search.spaces.architectures.plan import INPUT, Plan


def image_shape(input_shape: Sequence[int]) -> tuple[int, int, int]:
    """Return channels, height and width of inputs seen as images.

    Images keep their shape; [height, width] gets one channel. Flat inputs become a square image of one channel if their
    number is a square (64 features are 8 x 8: the images of `digits`, row by row). Otherwise they become an image of
    height 1.

    Raises:
        ConfigError: they have more than three dimensions, or none.
    """
    shape = tuple(input_shape)
    if len(shape) == 3:
        return shape
    if len(shape) == 2:
        return (1, *shape)
    if len(shape) == 1:
        side = isqrt(shape[0])
        return (1, side, side) if side * side == shape[0] and side > 1 else (1, 1, shape[0])
    raise ConfigError(
        f"search.architecture: the built-in spaces take inputs of [features], [height, width] or "
        f"[channels, height, width], and a sample of this task has shape {list(shape)}: write a space of your own"
    )


class PlannedNetwork(nn.Module):
    """A network from inputs [batch, *input_shape] to outputs [batch, num_outputs], built from the steps of a plan.

    The modules are in `steps`, under the names of the steps. Inputs may have any shape with the same number of values
    per sample.
    """

    def __init__(self, plan: Plan, input_shape: Sequence[int], num_outputs: int) -> None:
        """
        Args:
            plan: the steps.
            input_shape: shape of one sample.
            num_outputs: width of the final layer.
        """
        super().__init__()
        self.plan = plan
        self.input_shape = (prod(input_shape),) if plan.takes_features else image_shape(input_shape)
        self.steps = nn.ModuleDict()
        shapes: list[tuple[int, ...]] = [self.input_shape]
        for step in plan.steps:
            of_inputs = [shapes[value] for value in step.inputs]
            module, shape = operations.build(step.kind, dict(step.arguments), of_inputs, num_outputs)
            self.steps[step.name] = module
            shapes.append(shape)
        self._done_with = plan.last_uses()

    def forward(self, inputs: Tensor) -> Tensor:
        values = {INPUT: inputs.reshape(inputs.shape[0], *self.input_shape)}
        for index, (step, module) in enumerate(zip(self.plan.steps, self.steps.values(), strict=True)):
            result = module(*[values[value] for value in step.inputs])
            for value in self._done_with[index]:
                del values[value]
            values[index + 1] = result
        return values[len(self.plan.steps)]
