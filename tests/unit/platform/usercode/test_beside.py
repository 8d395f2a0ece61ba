"""The modules beside a user's file are found in the texts, and those alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestray.platform.errors import TaskError
from orchestray.platform.task import TaskSource
from orchestray.platform.usercode import beside
from orchestray.platform.usercode.beside import Texts, find_code, find_once, use_texts


def written(folder: Path, **texts: str) -> None:
    """Write files; in their names `__` stands for a slash, and each gets `.py`."""
    for name, text in texts.items():
        path = folder / f"{name.replace('__', '/').replace('/init', '/__init__')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def modules_of(file: Path) -> list[str]:
    return sorted(find_code(file, file.read_text(), Texts()).files)


def test_modules_that_are_imported_are_found_with_those_that_they_import_and_no_others(tmp_path: Path) -> None:
    written(
        tmp_path,
        task="import json, models.net as n\nfrom layers import Block\ndef late():\n    import rarely",
        models__init="",
        models__net="from . import shapes\nfrom .shapes import Shape",
        models__shapes="",
        models__unused="",
        layers="from task import late",
        rarely="",
        unrelated="",
    )
    assert modules_of(tmp_path / "task.py") == ["layers", "models", "models.net", "models.shapes", "rarely", "task"]


def test_a_file_with_relative_imports_is_a_module_of_its_package(tmp_path: Path) -> None:
    written(
        tmp_path,
        lib__init="from . import names",
        lib__names="",
        lib__sub__init="",
        lib__sub__task="from ..net import Net\nfrom .own import x\nimport lib.other",
        lib__sub__own="",
        lib__net="",
        lib__other="",
    )
    found = modules_of(tmp_path / "lib" / "sub" / "task.py")
    assert found == ["lib", "lib.names", "lib.net", "lib.other", "lib.sub", "lib.sub.own", "lib.sub.task"]


def test_a_file_without_relative_imports_is_a_script_also_in_a_package(tmp_path: Path) -> None:
    written(tmp_path, lib__init="import heavy", lib__task="import net", lib__net="", heavy="")
    assert modules_of(tmp_path / "lib" / "task.py") == ["net", "task"]


def test_a_package_itself_may_be_the_file(tmp_path: Path) -> None:
    written(tmp_path, lib__init="from .net import Net", lib__net="from . import names", lib__names="")
    assert modules_of(tmp_path / "lib" / "__init__.py") == ["lib", "lib.names", "lib.net"]


def test_relative_imports_need_no_init_file(tmp_path: Path) -> None:
    written(tmp_path, lib__task="from .net import Net\nfrom ..top import x", lib__net="", top="")
    assert modules_of(tmp_path / "lib" / "task.py") == ["lib.net", "lib.task", "top"]


def test_a_package_that_imports_by_names_made_at_run_time_is_taken_whole(tmp_path: Path) -> None:
    text = "import importlib, pkgutil\nfor m in pkgutil.iter_modules(__path__):\n    importlib.import_module(m.name)"
    written(tmp_path, task="import zoo, importlib\nimportlib.import_module('named')", named="", other="")
    written(tmp_path, zoo__init=text, zoo__lion="", zoo__cats__init="", zoo__cats__tiger="")
    expected = ["named", "task", "zoo", "zoo.cats", "zoo.cats.tiger", "zoo.lion"]
    assert modules_of(tmp_path / "task.py") == expected
    source = TaskSource.of_class(f"{tmp_path}/task.py:Mine", {})
    sent = find_code(tmp_path / "task.py", source.source or "", Texts(source.modules, is_all=True))
    assert sorted(sent.files) == expected  # another machine lists the sent texts, not its own folder


def test_a_folder_of_data_does_not_hide_an_installed_package(tmp_path: Path) -> None:
    written(tmp_path, task="import pytest.lines\nimport notes.lines", pytest__lines="", notes__lines="")
    assert modules_of(tmp_path / "task.py") == ["notes.lines", "task"]


def test_too_large_modules_are_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "MAX_BYTES", 2 << 20)
    written(tmp_path, task="import tables", tables=f"DATA = '{'x' * (2 << 20)}'")
    with pytest.raises(TaskError, match=r"that it imports have more than 2 MB of text, .*tables\.py\): install them"):
        TaskSource.of_class(f"{tmp_path}/task.py:Mine", {})


def test_a_module_that_is_no_text_is_named(tmp_path: Path) -> None:
    written(tmp_path, task="import odd")
    (tmp_path / "odd.py").write_bytes(b"\xff\xfe")
    with pytest.raises(TaskError, match=r"cannot read .*odd\.py, which the task imports: 'utf-8' codec"):
        TaskSource.of_class(f"{tmp_path}/task.py:Mine", {})


def test_texts_sent_from_another_process_stand_for_files_in_this_thread_alone(tmp_path: Path) -> None:
    written(tmp_path, task="import net", net="A = 1")
    before = TaskSource.of_class(f"{tmp_path}/task.py:Mine", {})
    written(tmp_path, net="A = 2")
    with use_texts(before.texts):
        assert TaskSource.of_class(f"{tmp_path}/task.py:Mine", {}) == before
    assert TaskSource.of_class(f"{tmp_path}/task.py:Mine", {}) != before


def test_inside_find_once_a_file_is_searched_once_and_after_it_again(tmp_path: Path) -> None:
    written(tmp_path, task="import layers", layers="")
    with find_once():
        assert modules_of(tmp_path / "task.py") == ["layers", "task"]
        written(tmp_path, layers="import blocks", blocks="")
        assert modules_of(tmp_path / "task.py") == ["layers", "task"]
        written(tmp_path, task="import blocks")
        assert modules_of(tmp_path / "task.py") == ["blocks", "task"]
    written(tmp_path, task="import layers")
    assert modules_of(tmp_path / "task.py") == ["blocks", "layers", "task"]


def test_inside_find_once_a_file_is_read_once_and_after_it_again(tmp_path: Path) -> None:
    written(tmp_path, task="A = 1")
    with find_once():
        assert Texts().read(tmp_path / "task.py") == "A = 1"
        written(tmp_path, task="A = 2")
        assert Texts().read(tmp_path / "task.py") == "A = 1"
        with use_texts({str(tmp_path / "task.py"): "A = 3"}):
            assert Texts().read(tmp_path / "task.py") == "A = 3"
    assert Texts().read(tmp_path / "task.py") == "A = 2"
