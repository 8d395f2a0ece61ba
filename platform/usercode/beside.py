"""The modules beside a user's file that it imports, found in the text of the files, which are not run.

The file is a module of a package if it says so: by an import with leading dots, or by one of its own package. Then its
name has the package's in front. Otherwise it is a script, as Python would run it. Names are looked for beside the file
first, then beside its package.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
"""Functions that import what the text does not name: all modules of the package that calls one belong to it.

So do all modules of a package that the name begins with: `import_module(f"models.{kind}")`.
"""

_sent: ContextVar[Mapping[str, str]] = ContextVar("texts of files", default=MappingProxyType({}))


@contextmanager
def use_texts(texts: Mapping[str, str]) -> Iterator[None]:
    """Use these texts of files, by absolute path, instead of what this machine has or lacks, in this thread."""
    token = _sent.set(texts)
    try:
        yield
    finally:
        _sent.reset(token)


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
        try:
            return path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None

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
    roots: tuple[Path, ...]
    """Folders in which names are looked for: the file's own, and that of its package."""

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
    package = _package_of(file, text, texts)
    own = [] if file.name == "__init__.py" and package else [file.stem.replace(".", "_")]
    main = ".".join([*package, *own])
    code = Code(main, {main: file}, {file: text}, tuple(dict.fromkeys([file.parent, file.parents[len(package)]])))
    search = _Search(code, texts, [main])
    search.with_module(".".join(package))
    return search.with_files(texts.given) if texts.is_all else code


def with_module(code: Code, name: str) -> Code:
    """Return a code with a module that its texts do not name, as it is on this machine, and those that it imports.

    Args:
        code: the code.
        name: dotted name of the module; if none is beside the file, the same code is returned.

    Raises:
        TaskError: a module cannot be read, or they are too large together.
    """
    known = Texts({str(path): text for path, text in code.texts.items()})
    copy = Code(code.main, dict(code.files), dict(code.texts), code.roots)
    return _Search(copy, known, []).with_module(name, is_whole="." not in name)


def is_installed(name: str, roots: Sequence[Path]) -> bool:
    """Return True if a module of this name, which has no dots, is also elsewhere than in these folders."""
    found = PathFinder.find_spec(name, [folder for folder in sys.path if Path(folder).absolute() not in roots])
    return found is not None and found.loader is not None and found.origin is not None


class _Search:
    """A search for the modules of one file."""

    def __init__(self, code: Code, texts: Texts, pending: list[str]) -> None:
        self._code, self._texts = code, texts
        self._pending = pending
        """Modules whose imports are still to be read."""
        self._num_bytes = sum(len(text.encode()) for text in code.beside.values())

    def with_files(self, paths: Iterable[str]) -> Code:
        """Add the files of these that no import names."""
        for path in sorted(map(Path, paths)):
            if path not in self._code.texts:
                for root in filter(path.is_relative_to, self._code.roots):
                    self.with_module(_module_at(path, root))
        return self._code

    def with_module(self, name: str, *, is_whole: bool = False) -> Code:
        """Add a module and those that it imports; with `is_whole` all of a folder that is a package without a file."""
        self._add(name)
        if is_whole and name not in self._code.files and not is_installed(name, self._code.roots):
            self._add_all(name)
        while self._pending:
            module = self._pending.pop()
            path = self._code.files[module]
            package = module if path.name == "__init__.py" else module.rpartition(".")[0]
            tree = _parsed(self._code.texts[path])
            for imported in _names_imported(tree, package):
                self._add(imported)
            for whole in _packages_imported_whole(tree, package):
                self._add_all(whole)
        return self._code

    def _add_all(self, package: str) -> None:
        """Add all modules of a package."""
        for folder in [root.joinpath(*package.split(".")) for root in self._code.roots]:
            for path in self._texts.modules_in(folder):
                self._add(".".join(filter(None, [package, _module_at(path, folder)])))

    def _add(self, name: str) -> None:
        """Add a module, with the packages around it, if its file is beside the user's."""
        parts = name.split(".")
        if not all(parts) or parts[0] in sys.builtin_module_names:
            return
        for root in self._code.roots:
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
                text = _read(self._texts, path) if text is None else text
                if text is not None:
                    found[".".join(parts[:depth])] = path, text
                    break
        # A folder without __init__.py is a package only where no other is, as for Python itself.
        is_folder = bool(found) and parts[0] not in found and parts[0] != self._code.main.partition(".")[0]
        return {} if is_folder and not self._texts.is_all and is_installed(parts[0], self._code.roots) else found

    def _take(self, module: str, path: Path, text: str) -> None:
        if module in self._code.files:
            return
        self._code.files[module], self._code.texts[path] = path, text
        self._pending.append(module)
        self._num_bytes += len(text.encode())
        if self._num_bytes > MAX_BYTES:
            raise TaskError(
                f"the modules beside {self._code.files[self._code.main]} that it imports have more than "
                f"{MAX_BYTES // 2**20} MB of text, too much to send to every worker and to keep with every run "
                f"(the last is {path}): install them as a package where the workers run, or import fewer"
            )


def _module_at(path: Path, folder: Path) -> str:
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _package_of(file: Path, text: str, texts: Texts) -> list[str]:
    """Return the names of the packages that a file is in; none if it is not a module of a package."""
    names: list[str] = []
    folder = file.parent
    while folder.name and _read(texts, folder / "__init__.py") is not None:
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


def _read(texts: Texts, path: Path) -> str | None:
    try:
        return texts.read(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise TaskError(f"cannot read {path}, which the task imports: {reason}") from error


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


def _packages_imported_whole(tree: ast.AST, package: str) -> Iterator[str]:
    """Yield the packages of which a module of `package` imports modules by names that its text does not show."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called(node) in _DYNAMIC:
            name = node.args[0] if node.args else None
            if not isinstance(name, ast.Constant):
                around = _absolute(_beginning(name).rpartition(".")[0], package) or package
                yield from [around] if around else []


def _beginning(name: ast.expr | None) -> str:
    """Return the constant text that an expression begins with: `models.` of `f"models.{kind}"`."""
    if isinstance(name, ast.JoinedStr) and name.values:
        return _beginning(name.values[0])
    if isinstance(name, ast.BinOp) and isinstance(name.op, ast.Add):
        return _beginning(name.left)
    return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else ""


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
