"""The modules beside a user's file that it imports, found in the text of the files, which are not run.

The file is a module of a package if it says so: by an import with leading dots, or by one of its own package. Then its
name has the package's in front. Otherwise it is a script, as Python would run it. Names are looked for beside the file
first, then beside its package.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from types import MappingProxyType

from orchestray.platform.errors import TaskError

MAX_BYTES = 4 * 1024 * 1024
"""Largest total size of the modules beside a file, in bytes: their text goes to every worker, and into the run."""

_DYNAMIC = frozenset({"import_module", "__import__", "iter_modules", "walk_packages"})
"""Functions that import what the text does not name: all modules of the package that calls one belong to it."""

_sent: ContextVar[Mapping[str, str]] = ContextVar("texts of files", default=MappingProxyType({}))


@contextmanager
def use_texts(texts: Mapping[str, str]) -> Iterator[None]:
    """Use these texts of files, by absolute path, instead of what this machine has or lacks, in this thread."""
    token = _sent.set(texts)
    try:
        yield
    finally:
        _sent.reset(token)


_found: ContextVar[dict[tuple[Path, str], Code] | None] = ContextVar("code that was found", default=None)
_read: ContextVar[dict[Path, str | None] | None] = ContextVar("texts that were read", default=None)


@contextmanager
def find_once() -> Iterator[None]:
    """Read each file, and look for the modules beside it, once in this thread: none changes meanwhile."""
    found, read = _found.set({}), _read.set({})
    try:
        yield
    finally:
        _found.reset(found)
        _read.reset(read)


@dataclass(frozen=True)
class Texts:
    """The texts of files: those that are given, else those of this machine."""

    given: Mapping[str, str] = field(default_factory=dict)
    """Texts by absolute path."""
    is_all: bool = False
    """True if there are no files but the given ones."""

    def read(self, path: Path) -> str | None:
        """Return the text of a file; None if there is no such file.

        Raises:
            OSError, UnicodeDecodeError: it cannot be read.
        """
        if self.is_all or str(path) in self.given:
            return self.given.get(str(path))
        if str(path) in _sent.get():
            return _sent.get()[str(path)]
        known = _read.get()
        if known is not None and path in known:
            return known[path]
        try:
            text = path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            text = None
        if known is not None:
            known[path] = text
        return text

    def modules_in(self, folder: Path) -> list[Path]:
        """Return all Python files in a folder and those in it, in order."""
        known = [Path(path) for path in (self.given if self.is_all else {**_sent.get(), **self.given})]
        found = {path for path in known if path.suffix == ".py" and path.is_relative_to(folder)}
        return sorted(found if self.is_all else found.union(folder.rglob("*.py")))


@dataclass(frozen=True)
class Code:
    """A user's file and the modules beside it that it imports, by their dotted names."""

    main: str
    """Name of the file's own module."""
    files: dict[str, Path]
    """File of each module, the file itself included."""
    texts: dict[Path, str]
    """Text of each file, the file itself included."""

    @property
    def beside(self) -> dict[str, str]:
        """Texts of the modules beside the file, by path."""
        main = self.files[self.main]
        return {str(path): text for path, text in sorted(self.texts.items()) if path != main}


def find_code(file: Path, text: str, texts: Texts) -> Code:
    """Return a file with the modules that it imports from its own folder or package, and those that they import.

    Args:
        file: absolute path of the file.
        text: its text.
        texts: texts of other files.

    Raises:
        TaskError: a module cannot be read, or they are too large together.
    """
    found = _found.get()
    if found is None or texts != Texts():
        return _Search(file, text, texts).code()
    if (file, text) not in found:
        found[file, text] = _Search(file, text, texts).code()
    return found[file, text]


class _Search:
    """A search for the modules of one file."""

    def __init__(self, file: Path, text: str, texts: Texts) -> None:
        self._texts = texts
        self._package = self._package_of(file, text)
        self._roots = list(dict.fromkeys([file.parent, file.parents[len(self._package)]]))
        own = [] if file.name == "__init__.py" and self._package else [file.stem.replace(".", "_")]
        main = ".".join([*self._package, *own])
        self._code = Code(main, {main: file}, {file: text})
        self._pending = [(main, text)]
        self._num_bytes = 0
        self._add(".".join(self._package))

    def code(self) -> Code:
        while self._pending:
            module, text = self._pending.pop()
            path = self._code.files[module]
            package = module if path.name == "__init__.py" else module.rpartition(".")[0]
            tree = _parsed(text)
            for name in _names_imported(tree, package):
                self._add(name)
            if package and _is_dynamic(tree):
                for other in self._texts.modules_in(path.parent):
                    inside = other.relative_to(path.parent).with_suffix("").parts
                    self._add(".".join([package, *(inside[:-1] if inside[-1] == "__init__" else inside)]))
        return self._code

    def _add(self, name: str) -> None:
        """Add a module, with the packages around it, if its file is beside the user's."""
        parts = name.split(".")
        if not all(parts) or parts[0] in sys.builtin_module_names:
            return
        for root in self._roots:
            if found := self._chain(root, parts):
                for module, (path, text) in found.items():
                    self._take(module, path, text)
                return

    def _chain(self, root: Path, parts: list[str]) -> dict[str, tuple[Path, str]]:
        """Return the files of a module and of the packages around it, as far as they are below `root`."""
        found: dict[str, tuple[Path, str]] = {}
        for depth in range(1, len(parts) + 1):
            place = root.joinpath(*parts[:depth])
            for path in (place / "__init__.py", place.with_name(f"{place.name}.py")):
                text = self._code.texts.get(path)
                text = self._read(path) if text is None else text
                if text is not None:
                    found[".".join(parts[:depth])] = path, text
                    break
        # A folder without __init__.py is a package only where no other is, as for Python itself.
        return {} if found and parts[0] not in found and self._is_installed(parts[0]) else found

    def _is_installed(self, name: str) -> bool:
        if self._texts.is_all or name in self._package:
            return False
        folders = {str(root) for root in self._roots}
        found = PathFinder.find_spec(name, [folder for folder in sys.path if folder not in folders])
        return found is not None and found.loader is not None and found.origin is not None

    def _package_of(self, file: Path, text: str) -> list[str]:
        """Return the names of the packages that a file is in; none if it is not a module of a package."""
        names: list[str] = []
        folder = file.parent
        while folder.name and self._read(folder / "__init__.py") is not None:
            names.insert(0, folder.name)
            folder = folder.parent
        tree = _parsed(text)
        levels = [node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        depth = max(levels, default=0) - 1
        if depth < 0 and not (names and any(name.split(".")[0] == names[0] for name in _names_imported(tree, ""))):
            return []
        while len(names) < depth and folder.name:  # two dots lead out of a folder without __init__.py, too
            names.insert(0, folder.name)
            folder = folder.parent
        return names

    def _read(self, path: Path) -> str | None:
        try:
            return self._texts.read(path)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise TaskError(f"cannot read {path}, which the task imports: {reason}") from error

    def _take(self, module: str, path: Path, text: str) -> None:
        if module in self._code.files:
            return
        self._code.files[module], self._code.texts[path] = path, text
        self._pending.append((module, text))
        self._num_bytes += len(text.encode())
        if self._num_bytes > MAX_BYTES:
            raise TaskError(
                f"the modules beside {self._code.files[self._code.main]} that it imports have more than "
                f"{MAX_BYTES // 2**20} MB of text, too much to send to every worker and to keep with every run "
                f"(the last is {path}): install them as a package where the workers run, or import fewer"
            )


def _parsed(text: str) -> ast.Module:
    """Return the syntax tree of a text; an empty one if it is not Python, which its import will report."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _names_imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Yield the dotted names that may be modules in the imports of a module of `package`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            around = _absolute("." * node.level + (node.module or ""), package)
            if around is not None:
                yield around
                yield from (f"{around}.{alias.name}".lstrip(".") for alias in node.names if alias.name != "*")
        elif isinstance(node, ast.Call) and _called(node) in _DYNAMIC and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield _absolute(name.value, package) or ""


def _is_dynamic(tree: ast.AST) -> bool:
    """Return True if a module imports others by names that its text does not show."""
    return any(
        isinstance(node, ast.Call)
        and _called(node) in _DYNAMIC
        and not (node.args and isinstance(node.args[0], ast.Constant))
        for node in ast.walk(tree)
    )


def _called(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _absolute(name: str, package: str) -> str | None:
    """Return the name without leading dots; None if they lead out of the outermost package."""
    rest = name.lstrip(".")
    level = len(name) - len(rest)
    if level == 0:
        return rest
    around = package.split(".") if package else []
    if level - 1 > len(around):
        return None
    return ".".join([*around[: len(around) - level + 1], *([rest] if rest else [])])
