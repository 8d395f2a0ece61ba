"""A registry of spaces by name, including users' own from files or modules."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, Final, Self

from orchestray.platform.config.paths import is_file_type
from orchestray.platform.errors import ConfigError, OrchestrayError, TaskError
from orchestray.platform.task import TaskSource, load_class
from orchestray.search.spaces.architectures.base import ArchitectureSpace, BuiltInSpace, Genome, Graph, Node

SPACES: Mapping[str, str] = {
    "chain": "orchestray.search.spaces.architectures.chain:Chain",
    "cell": "orchestray.search.spaces.architectures.cell:Cell",
    "genetic": "orchestray.search.spaces.architectures.genetic:Genetic",
    "hierarchical": "orchestray.search.spaces.architectures.hierarchical:Hierarchical",
    "modules": "orchestray.search.spaces.architectures.modules:Modules",
    "layer_graph": "orchestray.search.spaces.architectures.layer_graph:LayerGraph",
    "memory_bank": "orchestray.search.spaces.architectures.memory_bank:MemoryBank",
    "topology": "orchestray.search.spaces.architectures.topology:Topology",
    "painted": "orchestray.search.spaces.architectures.hyperneat:Painted",
}
"""Maps the name of each built-in space to "module:Class"."""

METHODS: Final = {
    "sample": ("rng",),
    "mutate": ("genome", "rng"),
    "crossover": ("a", "b", "rng"),
    "build": ("genome", "input_shape", "num_outputs"),
}
"""Methods of a space with their argument names."""


@dataclass(frozen=True)
class SpaceSource:
    """The source of a space, from which a machine without the user's file can create it. Picklable; JSON values."""

    name: str
    """Name of a built-in space, "package.module:Class", or "/absolute/path.py:Class"."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the constructor."""
    text: str | None = None
    """Text of the file that defines the class, if it is in one."""
    modules: dict[str, str] = field(default_factory=dict)
    """Texts of the modules beside that file that it imports, by absolute path."""

    @classmethod
    def read(
        cls, name: str, arguments: Mapping[str, Any] | None = None, known: Mapping[str, str] | None = None
    ) -> Self:
        """Return the source of a space named in a config, with the text of its file, and of the modules beside it.

        Args:
            name: name of a built-in space, "package.module:Class", or "path.py:Class" (relative to the working
                directory).
            arguments: arguments of the constructor.
            known: texts of files by path, which need not be there.

        Raises:
            ConfigError: the file cannot be read.
        """
        if not is_file_type(name):
            return cls(name, dict(arguments or {}))
        place, _, class_name = name.rpartition(":")
        file = Path(place).absolute()
        try:
            source = TaskSource.of_class(f"{file}:{class_name}", {}, noun="space's", known=known)
        except TaskError as error:
            raise ConfigError(f"search.architecture.space: {error}") from error
        return cls(source.type, dict(arguments or {}), source.source, source.modules)

    def make(self) -> ArchitectureSpace:
        """Create the space.

        Raises:
            ConfigError: the space does not exist, or rejects its arguments.
        """
        space_class = self._class()
        _check_arguments(space_class, self.arguments)
        try:
            space = space_class(**self.arguments)
        except OrchestrayError:
            raise
        except Exception as error:
            raise ConfigError(
                f"search.architecture: {space_class.__name__}(...) failed: {type(error).__name__}: {error}"
            ) from error
        if isinstance(space, BuiltInSpace):
            return space
        return OwnSpace(_checked(space))

    def _class(self) -> type:
        place, colon, class_name = self.name.rpartition(":")
        if not colon:
            if self.name not in SPACES:
                close = get_close_matches(self.name, SPACES, n=1)
                meant = f" (did you mean '{close[0]}'?)" if close else ""
                raise ConfigError(
                    f"search.architecture.space: there is no space {self.name!r}{meant}: built in are "
                    f'{", ".join(SPACES)}; your own is "path/to/file.py:Class" or "module:Class"'
                )
            module, class_name = SPACES[self.name].split(":")
            found: type = getattr(import_module(module), class_name)
            return found
        file = place if self.text is not None else None
        try:
            return load_class(TaskSource(self.name, {}, file, self.text, self.modules))
        except TaskError as error:
            text = str(error).replace("the task file", "the file").replace("task.type", "search.architecture.space")
            raise ConfigError(f"search.architecture.space: {text}") from error


def make_space(name: str, **arguments: Any) -> ArchitectureSpace:
    """Make a space of architectures by its name.

    Args:
        name: a key of `SPACES`, "package.module:Class" or "path/to/file.py:Class".
        arguments: arguments of its constructor.

    Raises:
        ConfigError: the space does not exist, lacks a method, or rejects its arguments.
    """
    return SpaceSource.read(name, arguments).make()


class OwnSpace:
    """A wrapper of a user's space that converts genomes to JSON values (NumPy's numbers, too) and explains errors.

    Raises:
        TaskError: raised by each method if a genome is not a JSON value or cannot be built; the text has the genome.
    """

    def __init__(self, space: ArchitectureSpace) -> None:
        self.space = space

    def sample(self, rng: Any) -> Genome:
        return self._plain("sample", self.space.sample(rng))

    def mutate(self, genome: Genome, rng: Any) -> Genome:
        return self._plain("mutate", self.space.mutate(genome, rng))

    def crossover(self, a: Genome, b: Genome, rng: Any) -> Genome:
        return self._plain("crossover", self.space.crossover(a, b, rng))

    def build(self, genome: Genome, input_shape: Any, num_outputs: int) -> Any:
        return built(self.space, genome, input_shape, num_outputs)

    def _plain(self, method: str, genome: Genome) -> Genome:
        """Return the genome as it will be read from the journal, so that a resumed search has the same one."""
        try:
            return json.loads(json.dumps(genome, allow_nan=False, default=_listed))
        except (TypeError, ValueError) as error:
            raise TaskError(
                f"the genome {genome!r}, of {type(self.space).__name__}.{method}, is no JSON value: {error}. Make it "
                "of dicts with text keys, lists, text, finite numbers, true, false and null"
            ) from error


def _listed(value: Any) -> Any:
    """Convert a NumPy number or array, or a tensor, to Python values."""
    to_list = getattr(value, "tolist", None)
    if not callable(to_list):
        raise TypeError(f"{value!r} is a {type(value).__name__}")
    return to_list()


def built(space: ArchitectureSpace, genome: Genome, input_shape: Any, num_outputs: int) -> Any:
    """Build the network of a genome.

    Raises:
        TaskError: the space cannot build it; the text has the genome and the reason.
    """
    from torch import nn

    try:
        network = space.build(genome, tuple(input_shape), num_outputs)
    except ConfigError as error:
        raise TaskError(f"the genome {genome!r} cannot be built: {error}") from error
    except OrchestrayError:
        raise
    except Exception as error:
        raise TaskError(f"the genome {genome!r} cannot be built: {type(error).__name__}: {error}") from error
    if not isinstance(network, nn.Module):
        raise TaskError(
            f"the genome {genome!r} cannot be built: {type(space).__name__}.build must return a torch.nn.Module, and "
            f"returned a {type(network).__name__}"
        )
    _finish_lazy(network, genome, input_shape)
    return network


def _finish_lazy(network: Any, genome: Genome, input_shape: Any) -> None:
    """Give lazy modules (`nn.LazyLinear`, ...) their shapes, since the network is not run before it is trained."""
    import torch
    from torch.nn.parameter import is_lazy

    from orchestray.trainers.core.modes import evaluating

    if not any(map(is_lazy, chain(network.parameters(), network.buffers()))):
        return
    try:
        with evaluating(network), torch.no_grad():
            network(torch.zeros(2, *input_shape))
    except Exception as error:
        raise TaskError(f"the genome {genome!r} cannot be built: {type(error).__name__}: {error}") from error


def graph_of(space: ArchitectureSpace, genome: Genome) -> Graph:
    """Return the network as a graph to draw; for a user's space, a single node with the genome."""
    return space.graph(genome) if isinstance(space, BuiltInSpace) else Graph((Node("network", repr(genome)),), ())


def text_of(space: ArchitectureSpace, genome: Genome) -> str:
    """Return a readable description of the genome."""
    return space.text(genome) if isinstance(space, BuiltInSpace) else repr(genome)


def _checked(space: Any) -> ArchitectureSpace:
    """Return the space if it has the required methods."""
    lacking = [
        f"search.architecture.space: class {type(space).__name__} lacks method '{name}({', '.join(takes)})'"
        for name, takes in METHODS.items()
        if not callable(getattr(space, name, None))
    ]
    if lacking:
        raise ConfigError(lacking)
    checked: ArchitectureSpace = space
    return checked


def _check_arguments(space_class: type, arguments: Mapping[str, Any]) -> None:
    try:
        parameters = inspect.signature(space_class).parameters.values()
    except (TypeError, ValueError):
        return
    names = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        names += list(arguments)
    problems = []
    for name in arguments:
        if name not in names:
            close = get_close_matches(name, names, n=1)
            meant = f" (did you mean '{close[0]}'?)" if close else f"; it takes {', '.join(names) or 'none'}"
            problems.append(f"search.architecture.{name}: is no argument of the space {space_class.__name__}{meant}")
    for parameter in parameters:
        is_plain = parameter.kind in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}
        if is_plain and parameter.default is parameter.empty and parameter.name not in arguments:
            problems.append(
                f"search.architecture.{parameter.name}: is required by the space {space_class.__name__}, and missing"
            )
    if problems:
        raise ConfigError(problems)
