"""Networks designed for a particular split over workers, on the handwritten digits.

They are not built-in tasks. A config names them by module and class like a user's task, for example
`task.type=orchestray.trainers.tasks.digits_networks:TreeNetDigits`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.trainers.parallel.tensor.branches import Branches
from orchestray.trainers.parallel.tensor.locality import LocallyConnected2d, Tiled, TiledConv2d
from orchestray.trainers.parallel.tensor.mesh import plan_of_layout
from orchestray.trainers.tasks.digits import NUM_CLASSES, SIDE, Digits
from orchestray.trainers.tasks.layers import multilayer_perceptron

if TYPE_CHECKING:
    from orchestray.platform.task import Batch

NUM_PIXELS = SIDE * SIDE


class LocallyConnectedDigits(Digits):
    """Two locally connected layers (Coates et al. 2013); a tensor worker holds rows of the image with their weights.

    Args:
        channels: channels of both layers.
    """

    def __init__(self, channels: int = 8) -> None:
        super().__init__(model="cnn")
        self._channels = channels

    def build_model(self) -> nn.Module:
        channels, side = self._channels, SIDE - 4  # two windows of 3 x 3
        first = LocallyConnected2d(1, channels, (SIDE, SIDE), 3)
        second = LocallyConnected2d(channels, channels, (SIDE - 2, SIDE - 2), 3)
        last = nn.Linear(channels * side * side, NUM_CLASSES)
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), last)

    def tensor_plan(self, model: nn.Module) -> dict[str, str]:
        return {"0:4": "height"}


class TiledDigits(Digits):
    """Convolutions whose weights are shared by every second tile of the image, or by every second place.

    Args:
        channels: channels of the convolutions.
        num_tiles: number of tiles, alternately of two kinds: even, and a divisor of the image's 8 rows.
        tile: rows and columns after which weights recur in one layer over the whole image (Ngiam et al. 2010), whose
            windows overlap; None: tiles without a halo.
    """

    def __init__(self, channels: int = 16, num_tiles: int = 4, tile: int | None = None) -> None:
        super().__init__(model="cnn")
        self._channels = channels
        self._num_tiles = num_tiles
        self._tile = tile

    def build_model(self) -> nn.Module:
        if self._tile is not None:
            layer = TiledConv2d(self._tile, 1, self._channels, (SIDE, SIDE), 3)
            outputs = nn.Linear(self._channels * (SIDE - 2) ** 2, NUM_CLASSES)
            return nn.Sequential(layer, nn.ReLU(), nn.Flatten(), outputs)
        kinds: list[nn.Module] = [
            nn.Sequential(nn.Conv2d(1, self._channels, 3, padding=1), nn.ReLU()) for _ in range(2)
        ]
        last = nn.Linear(self._channels * NUM_PIXELS, NUM_CLASSES)
        return nn.Sequential(Tiled(kinds, self._num_tiles), nn.Flatten(), last)

    def tensor_plan(self, model: nn.Module) -> dict[str, str]:
        return {"0:1": "height"}


class MeshDigits(Digits):
    """A fully connected network whose weights have named dimensions, for layouts as in Mesh-TensorFlow.

    The dimensions are `pixels`, `hidden1`, `hidden2` and so on, and `classes`, with the samples as `batch`.

    Args:
        layout: dimension of the mesh, `data` or `tensor`, by the name of what is split along it.
        hidden: widths of the hidden layers.
    """

    def __init__(self, layout: Mapping[str, str], hidden: Sequence[int] = (128, 128)) -> None:
        super().__init__(hidden=hidden)
        self._layout = layout
        self._names = ["pixels", *(f"hidden{number}" for number in range(1, len(hidden) + 1)), "classes"]

    def tensor_plan(self, model: nn.Module) -> dict[str, str]:
        layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        dimensions = zip(self._names[1:], self._names, strict=False)
        return plan_of_layout(dict(zip(layers, dimensions, strict=True)), self._layout)


class TreeNetDigits(Digits):
    """Members of an ensemble that share their first layers, with a loss of the whole ensemble (Lee et al. 2015).

    The model returns the members' logits [samples, members, classes]. With the plan `branches` each tensor worker holds
    the trunk and some of the members.

    Args:
        hidden: widths of the hidden layers of a member, the shared ones included.
        junction: number of shared hidden layers.
        members: number of members.
        ensemble_weight: weight of the ensemble's own loss, from 0 to 1; the rest is the mean of the members' losses.
    """

    def __init__(
        self, hidden: Sequence[int] = (64, 64), junction: int = 1, members: int = 4, ensemble_weight: float = 0.5
    ) -> None:
        super().__init__(hidden)
        self._junction = junction
        self._members = members
        self._ensemble_weight = ensemble_weight

    def build_model(self) -> nn.Module:
        trunk: list[nn.Module] = []
        width = NUM_PIXELS
        for number in self._hidden[: self._junction]:
            trunk += [nn.Linear(width, number), nn.ReLU()]
            width = number
        members = [
            nn.Sequential(
                multilayer_perceptron(width, self._hidden[self._junction :], NUM_CLASSES),
                nn.Unflatten(1, (1, NUM_CLASSES)),
            )
            for _ in range(self._members)
        ]
        return nn.Sequential(*trunk, Branches(members, "concat", 1))

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        targets = batch["targets"]
        alone = functional.cross_entropy(outputs.transpose(1, 2), targets.unsqueeze(1).expand(-1, outputs.shape[1]))
        together = functional.nll_loss(_of_ensemble(outputs), targets)
        return self._ensemble_weight * together + (1 - self._ensemble_weight) * alone

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        return super().metrics(_of_ensemble(outputs), batch)


def _of_ensemble(logits: Tensor) -> Tensor:
    """Return the logarithms of the members' mean probabilities, [samples, classes]."""
    return functional.log_softmax(logits, 2).logsumexp(1) - math.log(logits.shape[1])


class DeepStacking(nn.Module):
    """Modules that each receive the raw inputs and the outputs of all modules before (Deng and Yu 2011, section 2).

    Module k has the hidden units `h_k = sigmoid(W_k [x; y_1 .. y_(k-1)] + b_k)` and the outputs `y_k = U_k h_k + c_k`.
    The raw parts W_k x of all modules are one product (`raw`), which does not wait for any of them. Split by its
    outputs, tensor workers compute the raw parts of different modules at once. The solver `stacking` trains them one
    after the other.

    Args:
        num_inputs: number of raw inputs.
        width: hidden units of each module.
        depth: number of modules.
        num_outputs: outputs of each module; those of the last are the network's.
    """

    def __init__(self, num_inputs: int, width: int, depth: int, num_outputs: int) -> None:
        super().__init__()
        self.raw = nn.Linear(num_inputs, width * depth)
        self.previous = nn.ModuleList(nn.Linear(num_outputs * below, width, bias=False) for below in range(1, depth))
        self.upper = nn.ModuleList(nn.Linear(width, num_outputs) for _ in range(depth))
        self._depth = depth

    def forward(self, x: Tensor) -> Tensor:
        first, *raw = self.raw(x).chunk(self._depth, 1)
        y: Tensor = self.upper[0](torch.sigmoid(first))
        results = y
        for own, previous, upper in zip(raw, self.previous, self.upper[1:], strict=True):
            y = upper(torch.sigmoid(own + previous(results)))
            results = torch.cat([results, y], 1)
        return y


class DeepStackingDigits(Digits):
    """A `DeepStacking` network on the digits.

    Args:
        width: hidden units of each module.
        depth: number of modules.
    """

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self._width = width
        self._depth = depth

    def build_model(self) -> nn.Module:
        return DeepStacking(NUM_PIXELS, self._width, self._depth, NUM_CLASSES)

    def tensor_plan(self, model: nn.Module) -> dict[str, str]:
        return {"raw": "output_gathered"}


class RestrictedBoltzmann(nn.Module):
    """A restricted Boltzmann machine, with one step of contrastive divergence (Hinton 2002) per sample.

    `forward` maps visible units [samples, visible] from 0 to 1 to [samples, 2]. The first column is the difference
    between the free energies of the sample and its reconstruction, whose mean has the gradient of CD-1. The second is
    the squared error of the reconstruction. Hidden units are drawn in training if `is_sampled`. Reconstructions are
    probabilities (Hinton's "Practical Guide" of 2010, section 3.2).
    """

    draws_random = True

    def __init__(self, num_visible: int, num_hidden: int, is_sampled: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.01 * torch.randn(num_hidden, num_visible))
        self.visible = nn.Parameter(torch.zeros(num_visible))
        self.hidden = nn.Parameter(torch.zeros(num_hidden))
        self._is_sampled = is_sampled

    def forward(self, data: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.hidden_probabilities(data)
            if self._is_sampled and self.training:
                hidden = torch.bernoulli(hidden)
            rebuilt = torch.sigmoid(functional.linear(hidden, self.weight.T, self.visible))
        energies = self.free_energy(data) - self.free_energy(rebuilt)
        return torch.stack([energies, (data - rebuilt).square().mean(1)], 1)

    def hidden_probabilities(self, data: Tensor) -> Tensor:
        """Return the probabilities of the hidden units, [samples, hidden], given visible ones."""
        return torch.sigmoid(functional.linear(data, self.weight, self.hidden))

    def free_energy(self, visible: Tensor) -> Tensor:
        """Return -v a - sum log(1 + exp(W v + b)) of each sample."""
        hidden = functional.softplus(functional.linear(visible, self.weight, self.hidden))
        return -(visible @ self.visible) - hidden.sum(1)


class RestrictedBoltzmannDigits(Digits):
    """The digits' pixels as the visible units of a `RestrictedBoltzmann`; labels are not used.

    Args:
        num_hidden: number of hidden units.
        is_sampled: True if hidden units are drawn in training; else their probabilities are used (mean field).
    """

    def __init__(self, num_hidden: int = 64, is_sampled: bool = True) -> None:
        super().__init__()
        self._num_hidden = num_hidden
        self._is_sampled = is_sampled

    def build_model(self) -> nn.Module:
        return RestrictedBoltzmann(NUM_PIXELS, self._num_hidden, self._is_sampled)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return outputs[:, 0].mean()

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"reconstruction_error": outputs[:, 1].mean()}


class DeepBelief(nn.Module):
    """A deep belief network in greedy training: the last of its Boltzmann machines learns what those below make.

    Those below are not trained. Their hidden probabilities are the visible units of the next one (Hinton, Osindero and
    Teh 2006; in parallel: Raina, Madhavan and Ng 2009). `forward` returns what the last machine does.
    """

    draws_random = True

    def __init__(self, num_visible: int, widths: Sequence[int], is_sampled: bool = True) -> None:
        super().__init__()
        sizes = [num_visible, *widths]
        self.layers = nn.ModuleList(RestrictedBoltzmann(*pair, is_sampled=is_sampled) for pair in pairwise(sizes))
        for below in self.layers[:-1]:
            below.requires_grad_(False)

    def forward(self, data: Tensor) -> Tensor:
        for machine in self.layers[:-1]:
            assert isinstance(machine, RestrictedBoltzmann)
            data = machine.hidden_probabilities(data)
        y: Tensor = self.layers[-1](data)
        return y


class DeepBeliefDigits(RestrictedBoltzmannDigits):
    """A `DeepBelief` network on the digits, of which a run trains the last layer.

    Train one layer first. Then a run with one width more takes the layers below from it: `train.init_from` is the run
    before, and `train.init_except` names the new layer, as `layers.1.*`.

    Args:
        widths: numbers of hidden units, from the pixels up.
        is_sampled: as in `RestrictedBoltzmannDigits`.
    """

    def __init__(self, widths: Sequence[int] = (64,), is_sampled: bool = True) -> None:
        super().__init__(is_sampled=is_sampled)
        self._widths = widths

    def build_model(self) -> nn.Module:
        return DeepBelief(NUM_PIXELS, self._widths, self._is_sampled)
