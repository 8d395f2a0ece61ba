"""The import of users' code under names of its own, so that two files with a `models.py` beside each do not mix.

All modules of one code are below a package that no file has: `orchestray_task_net_0123456789ab.models`. An import
statement in one of them, or its `importlib.import_module`, finds those beside it first, in functions as well. Nobody
else's imports are touched.

The texts may not name a module: it is compiled, or its name is made at run time. It is looked for in the file's folder
at its first import, and gets such a name, too. A library may import by a name that it was given, such as `layers.Net`
in a pickle. It gets a module without code, which asks the modules of the code that called the library.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib
import linecache
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from orchestray.platform.usercode.beside import Code, Texts, find_code, is_installed, with_module

_CLOUDPICKLES = ("ray.cloudpickle", "joblib.externals.cloudpickle", "cloudpickle")
"""Modules that can send functions to processes which do not know these names."""


class OwnCode:
    """The modules of one user's file in this process."""

    def __init__(self, root: str, code: Code) -> None:
        self.root = root
        self.code = code
        self._sent = frozenset(code.texts)
        self._tops = {name.partition(".")[0] for name in code.files}
        self.others: set[str] = set()
        """Names that were not found beside the file, not looked for again until it is imported again."""
        # The interpreter looks for the function behind `import` here, for the code of these modules only.
        self.builtins = {**vars(builtins), "__import__": self._import}
        self._importlib = _Importlib(self._import_module)

    @property
    def found_late(self) -> dict[str, str]:
        """Texts of the modules that were found at their import, by path."""
        return {str(path): text for path, text in self.code.texts.items() if path not in self._sent}

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,  # noqa: A002 - Python's names
        locals: Mapping[str, object] | None = None,  # noqa: A002
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        # C code, such as that of pickle, gives an empty list, and takes the module of the very name from sys.modules.
        if level or (isinstance(fromlist, list) and not fromlist) or not self.has(name):
            found = builtins.__import__(name, globals, locals, fromlist or (), level)
            return self._importlib if found is importlib else found
        if fromlist:
            return builtins.__import__(f"{self.root}.{name}", globals, locals, fromlist, 0)
        import_module(f"{self.root}.{name}")
        return sys.modules[f"{self.root}.{name.partition('.')[0]}"]

    def _import_module(self, name: str, package: str | None = None) -> ModuleType:
        return import_module(f"{self.root}.{name}" if self.has(name) else name, package)

    def has(self, name: str) -> bool:
        """Return True if a module, or the package around it, is beside the file."""
        top = name.partition(".")[0]
        if top in self._tops:
            return True
        if top in self.others:
            return False
        there = PathFinder.find_spec(top, [str(root) for root in self.code.roots])
        if there is not None and isinstance(there.loader, ExtensionFileLoader):
            return True
        if there is not None and top not in sys.builtin_module_names:
            self._take(name)
        if top not in self._tops:
            self.others.add(top)
        return top in self._tops

    def spec_of(self, name: str) -> ModuleSpec:
        """Return how to import a module below `root`.

        Raises:
            ModuleNotFoundError: the code has none of that name.
        """
        own = f"{self.root}.{name}" if name else self.root
        if name and not self._knows(name):
            compiled = self._compiled(name)
            if compiled is not None and compiled.origin is not None:
                return spec_from_file_location(own, compiled.origin) or compiled
            self._take(name)
        path = self.code.files.get(name)
        if path is not None:
            spec = ModuleSpec(
                own, _TextLoader(self, own, path), origin=str(path), is_package=path.name == "__init__.py"
            )
            spec.has_location = True
            if spec.submodule_search_locations is not None:
                spec.submodule_search_locations.append(str(path.parent))
            return spec
        if not name or self._knows(name):
            return ModuleSpec(own, None, is_package=True)
        raise ModuleNotFoundError(
            f"No module named {name!r} was found beside {self.code.files[self.code.main]}: it must be a .py file there "
            "when the run begins, and for other machines one that an import statement names",
            name=own,
        )

    def _knows(self, name: str) -> bool:
        return name in self.code.files or any(other.startswith(f"{name}.") for other in self.code.files)

    def _take(self, name: str) -> None:
        """Take a module that the texts do not name, if it is there, from this machine's files."""
        with _lock:
            self.code = with_module(self.code, name)
            self._tops |= {name.partition(".")[0] for name in self.code.files}

    def _compiled(self, name: str) -> ModuleSpec | None:
        inside, _, last = name.rpartition(".")
        folders = [str(root.joinpath(*filter(None, inside.split(".")))) for root in self.code.roots]
        found = PathFinder.find_spec(last, folders)
        return found if found is not None and isinstance(found.loader, ExtensionFileLoader) else None


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


class _NameOfLibrary(ModuleType, Loader):
    """A module, and its loader, for a name by which a library imports one of a user's: it holds no code.

    Two codes may have a module of that name, so each attribute is asked of the code that called the library.
    """

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing: the module has its code under a name of its own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own(), name)

    def __dir__(self) -> list[str]:
        return dir(self._own())

    @property
    def __spec__(self) -> ModuleSpec | None:
        return self._own().__spec__

    @__spec__.setter  # noqa: A003 - the property above
    def __spec__(self, spec: ModuleSpec | None) -> None: ...

    def _own(self) -> ModuleType:
        name = self.__name__
        own = _finder.asking(name)
        if own is None:
            raise AttributeError(f"module {name!r} is beside the file of another task")
        return import_module(f"{own.root}.{name}")


class _Finder(MetaPathFinder):
    """A finder of the modules of all codes of this process."""

    def __init__(self) -> None:
        self.codes: dict[str, OwnCode] = {}
        """By their roots, the one that was imported last at the end."""
        self.changed: dict[str, str] = {}
        """Roots of codes of which a module that was found late has changed since, and those that took their place."""

    def find_spec(self, fullname: str, path: Any = None, _target: Any = None) -> ModuleSpec | None:
        root, _, name = fullname.partition(".")
        own = self.codes.get(root)
        if own is not None:
            return own.spec_of(name)
        if path is not None:
            return self.lend(fullname, self.asking(fullname)) if type(sys.modules.get(root)) is _NameOfLibrary else None
        own = self._calling()
        is_theirs = own is not None and not is_installed(fullname, own.code.roots) and own.has(fullname)
        return self.lend(fullname, own) if is_theirs else None

    def lend(self, name: str, own: OwnCode | None) -> ModuleSpec | None:
        """Return how to import a module of a code by the name without its root."""
        if own is None:
            return None
        found = import_module(f"{own.root}.{name}")
        spec = ModuleSpec(
            name, _NameOfLibrary(name), origin=getattr(found, "__file__", None), is_package=hasattr(found, "__path__")
        )
        spec.has_location = spec.origin is not None
        return spec

    def asking(self, name: str) -> OwnCode | None:
        """Return the code that has called this, else the last one that was imported, if it has such a module."""
        own = self._calling()
        codes = reversed(list(self.codes.values())) if own is None else [own]
        return next((own for own in codes if own.has(name)), None)

    def _calling(self) -> OwnCode | None:
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            own = self.codes.get(str(frame.f_globals.get("__name__")).partition(".")[0])
            if own is not None:
                return own
            frame = frame.f_back
        return None


class _LastFinder(MetaPathFinder):
    """A finder that is asked when no other has found a module."""

    def find_spec(self, fullname: str, path: Any = None, _target: Any = None) -> ModuleSpec | None:
        return None if path is not None else _finder.lend(fullname, _finder.asking(fullname))


_finder, _last_finder = _Finder(), _LastFinder()
_lock = threading.RLock()
"""Held while codes are added to or changed; never while a module is imported."""


def import_file(file: str, text: str, beside: Mapping[str, str]) -> ModuleType:
    """Run a file's text as a module, as if imported from its path; the same texts give the same module.

    Args:
        file: absolute path of the file.
        text: its text.
        beside: texts of the modules beside it that it imports, by absolute path.

    Raises:
        Exception: whatever the code raises.
    """
    with _lock:
        own = _code_of(Path(file), {**beside, file: text})
        own.others.clear()
        _finder.codes[own.root] = _finder.codes.pop(own.root, own)
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
            sys.meta_path.append(_last_finder)
    found = import_module(f"{own.root}.{own.code.main}")
    for cloudpickle in filter(None, map(sys.modules.get, _CLOUDPICKLES)):
        cloudpickle.register_pickle_by_value(sys.modules[own.root])
    return found


def modules_found(file: str, text: str, beside: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of the modules of a file that this process has found late, by path; see `import_file`."""
    with _lock:
        root = _root_of(Path(file), {**beside, file: text})
        own = _finder.codes.get(_finder.changed.get(root, root))
        return {} if own is None else own.found_late


def _code_of(file: Path, texts: Mapping[str, str]) -> OwnCode:
    """Return the code of these texts; another one if what it found late has changed since."""
    root = first = _root_of(file, texts)
    known = _finder.codes.get(_finder.changed.get(root, root))
    if known is not None:
        now = {path: _text_now(Path(path)) for path in known.found_late}
        if now == known.found_late:
            return known
        root = _root_of(file, {**texts, **now})
        _finder.changed[first] = root
    return _finder.codes.get(root) or OwnCode(root, find_code(file, texts[str(file)], Texts(texts, is_all=True)))


def _root_of(file: Path, texts: Mapping[str, str]) -> str:
    return f"orchestray_task_{file.stem.replace('.', '_')}_{digest_of(texts)[:12]}"


def _text_now(path: Path) -> str:
    try:
        return Texts().read(path) or ""
    except (OSError, UnicodeDecodeError):
        return ""  # its import reports it


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
