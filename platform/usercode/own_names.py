"""The import of users' code under names of its own, so that two files with a `models.py` beside each do not mix.

All modules of one code are below a package that no file has: `orchestray_task_net_0123456789ab.models`. An import
statement in one of them, or its `importlib.import_module`, finds those beside it first, in functions as well. Nobody
else's imports are touched.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib
import linecache
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from orchestray.platform.usercode.beside import Code, Texts, find_code

_CLOUDPICKLES = ("ray.cloudpickle", "joblib.externals.cloudpickle", "cloudpickle")
"""Modules that can send functions to processes which do not know these names."""


class OwnCode:
    """The modules of one user's file in this process."""

    def __init__(self, root: str, code: Code) -> None:
        self.root = root
        self.code = code
        self._tops = {name.partition(".")[0] for name in code.files}
        # The interpreter looks for the function behind `import` here, for the code of these modules only.
        self.builtins = {**vars(builtins), "__import__": self._import}
        self._importlib = _Importlib(self._import_module)

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,  # noqa: A002 - Python's names
        locals: Mapping[str, object] | None = None,  # noqa: A002
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        top = name.partition(".")[0]
        if level or top not in self._tops:
            found = builtins.__import__(name, globals, locals, fromlist or (), level)
            return self._importlib if found is importlib else found
        if fromlist:
            return builtins.__import__(f"{self.root}.{name}", globals, locals, fromlist, 0)
        import_module(f"{self.root}.{name}")
        return sys.modules[f"{self.root}.{top}"]

    def _import_module(self, name: str, package: str | None = None) -> ModuleType:
        return import_module(f"{self.root}.{name}" if name.partition(".")[0] in self._tops else name, package)

    def spec_of(self, name: str) -> ModuleSpec:
        """Return how to import a module below `root`.

        Raises:
            ModuleNotFoundError: the code has none of that name.
        """
        own = f"{self.root}.{name}" if name else self.root
        path = self.code.files.get(name)
        if path is not None:
            spec = ModuleSpec(
                own, _TextLoader(self, own, path), origin=str(path), is_package=path.name == "__init__.py"
            )
            spec.has_location = True
            if spec.submodule_search_locations is not None:
                spec.submodule_search_locations.append(str(path.parent))
            return spec
        if not name or any(other.startswith(f"{name}.") for other in self.code.files):
            return ModuleSpec(own, None, is_package=True)
        raise ModuleNotFoundError(
            f"No module named {name!r} was found beside {self.code.files[self.code.main]} when the run began: it must "
            "be a .py file there that an import statement names",
            name=own,
        )


class _Importlib(ModuleType):
    """The module `importlib` as the modules of one code see it."""

    def __init__(self, import_module: Callable[..., ModuleType]) -> None:
        super().__init__("importlib")
        self.__dict__.update(vars(importlib))
        self.import_module = import_module

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib, name)  # a module of the package that was imported since


class _TextLoader(SourceFileLoader):
    """A loader that runs a module's text as it was when the run began; data beside it are read where they are."""

    def __init__(self, own: OwnCode, name: str, path: Path) -> None:
        super().__init__(name, str(path))
        self._own, self._text = own, own.code.texts[path]

    def get_source(self, fullname: str) -> str:
        return self._text

    def exec_module(self, module: ModuleType) -> None:
        path, text = str(self.path), self._text
        # Without a modification time: tracebacks show these lines, even if the file has changed since or is not here.
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
        module.__dict__["__builtins__"] = self._own.builtins
        exec(compile(text, path, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - the user's own code


class _Finder(MetaPathFinder):
    """A finder of the modules of all codes of this process."""

    def __init__(self) -> None:
        self.codes: dict[str, OwnCode] = {}

    def find_spec(self, fullname: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        root, _, name = fullname.partition(".")
        own = self.codes.get(root)
        return None if own is None else own.spec_of(name)


_finder = _Finder()


def import_file(file: str, text: str, beside: Mapping[str, str]) -> ModuleType:
    """Run a file's text as a module, as if imported from its path; the same texts give the same module.

    Args:
        file: absolute path of the file.
        text: its text.
        beside: texts of the modules beside it that it imports, by absolute path.

    Raises:
        Exception: whatever the code raises.
    """
    path = Path(file)
    digest = digest_of({**beside, file: text})[:12]
    root = f"orchestray_task_{path.stem.replace('.', '_')}_{digest}"
    if root not in _finder.codes:
        code = find_code(path, text, Texts(beside, is_all=True))
        _finder.codes[root] = OwnCode(root, code)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _append_to_path(path.parent)
    found = import_module(f"{root}.{_finder.codes[root].code.main}")
    for cloudpickle in filter(None, map(sys.modules.get, _CLOUDPICKLES)):
        cloudpickle.register_pickle_by_value(sys.modules[root])
    return found


def without_own_names(text: str) -> str:
    """Return a text, such as that of an error, in which modules have the names that the user knows."""
    for root in _finder.codes:
        text = text.replace(f"{root}.", "")
    return text


def digest_of(texts: Mapping[str, str]) -> str:
    """Return the SHA-256 of texts and their names."""
    digest = hashlib.sha256()
    for name, text in sorted(texts.items()):
        digest.update(f"{name}\0{len(text)}\0{text}\0".encode())
    return digest.hexdigest()


def _append_to_path(folder: Path) -> None:
    """Let Python find what else is in a file's folder (compiled modules, names made at run time), after all others."""
    if folder.is_dir() and str(folder) not in sys.path:
        sys.path.append(str(folder))
