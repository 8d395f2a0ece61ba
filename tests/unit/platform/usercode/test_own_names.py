"""Users' modules are imported under names of their own: codes do not mix, and nobody else sees them."""

from __future__ import annotations

import inspect
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import markupsafe
import pytest
import torch

from orchestray.platform.errors import TaskError
from orchestray.platform.task import TaskSource, load_class


@pytest.fixture(autouse=True)
def _what_others_see_has_no_code(tmp_path: Path) -> Iterator[None]:
    yield
    assert not [folder for folder in sys.path if folder.startswith(str(tmp_path))]
    for name, module in list(sys.modules.items()):
        if not name.startswith("orchestray_task_") and str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            assert not {"Net", "V"} & vars(module).keys()
            del sys.modules[name]


def written(folder: Path, name: str = "task.py:Mine", **texts: str) -> TaskSource:
    """Write files, and return the source of a class in them."""
    for place, text in texts.items():
        path = folder / f"{place.replace('__', '/').replace('/init', '/__init__')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return TaskSource.of_class(f"{folder}/{name}", {})


def sent(folder: Path, name: str = "task.py:Mine", **texts: str) -> TaskSource:
    """Write files, and return the source of a class in them; nothing of them is left on the disk."""
    source = written(folder, name, **texts)
    shutil.rmtree(folder)
    return TaskSource.from_json(source.to_json())


def test_two_tasks_whose_modules_differ_do_not_mix(tmp_path: Path) -> None:
    text = "import models\nfrom models.net import SIZE\nclass Mine:\n    size = models.SIZE + SIZE"
    sizes = [
        load_class(
            sent(tmp_path / str(size), task=text, models__init=f"SIZE = {size}", models__net=f"SIZE = {10 * size}")
        )
        for size in (1, 2)
    ]
    assert [made.size for made in sizes] == [11, 22]  # type: ignore[attr-defined]
    assert "models" not in sys.modules


def test_a_module_that_has_changed_since_is_another_one(tmp_path: Path) -> None:
    sizes = []
    for size in (1, 2):
        source = sent(tmp_path / "a", task="import net\nclass Mine:\n    size = net.SIZE", net=f"SIZE = {size}")
        sizes.append(load_class(source).size)  # type: ignore[attr-defined]
    assert sizes == [1, 2]


@pytest.mark.parametrize(
    "call",
    [
        "import importlib\nh = importlib.import_module('helper')",
        "from importlib import import_module, util\nh = import_module('helper')",
        "import importlib.util\nassert importlib.util.find_spec\nh = importlib.import_module('helper')",
        "import importlib.resources as r\nassert r.files\nh = __import__('helper')",
    ],
)
def test_modules_imported_by_a_function_do_not_mix_either(tmp_path: Path, call: str) -> None:
    made = [
        load_class(sent(tmp_path / str(value), task=f"{call}\nclass Mine:\n    value = h.V", helper=f"V = {value}"))
        for value in (1, 2)
    ]
    assert [each.value for each in made] == [1, 2]  # type: ignore[attr-defined]
    assert "helper" not in sys.modules


RUN_TIME_NAMES = {
    "of its own import": "import importlib\nname = 'hel' + 'per'\nV = importlib.import_module(name).V",
    "in a package": "import importlib\nkind = 'deep'\nV = importlib.import_module(f'helpers.{kind}').V",
    "in a text": "names = {}\nexec('from helper import V', names)\nV = names['V']",
    "by a library": "import pkgutil\nV = pkgutil.resolve_name('helper:V')",
    "by a library in a package": "import pkgutil\nV = pkgutil.resolve_name('helpers.deep:V')",
    "found, not imported": "import importlib.util\nfile = importlib.util.find_spec('helper').origin\n"
    "names = {}\nexec(open(file).read(), names)\nV = names['V']",
}


@pytest.mark.parametrize("on_path", [False, True])
@pytest.mark.parametrize("how", RUN_TIME_NAMES)
def test_modules_named_at_run_time_do_not_mix_and_an_edit_of_one_is_seen(
    tmp_path: Path, how: str, on_path: bool
) -> None:
    values = []
    for folder, value in (("a", 1), ("b", 2), ("a", 3)):
        text = f"V = {value}"
        task = f"{RUN_TIME_NAMES[how]}\nclass Mine:\n    value = V"
        texts = {"task": task, "helper": text, "helpers__deep": text}
        with pytest.MonkeyPatch.context() as patch:
            if on_path:  # as where the user's own script or notebook is beside the task
                patch.syspath_prepend(str(tmp_path / folder))
            made: Any = load_class(written(tmp_path / folder, **texts))
        values.append(made.value)
    assert values == [1, 2, 3]


def test_what_is_found_at_run_time_is_kept_with_what_is_sent(tmp_path: Path) -> None:
    task = "name = 'hel' + 'per'\nclass Mine:\n    value = __import__(name).V"
    source = written(tmp_path / "a", task=task, helper="from deeper import V", deeper="V = 1")
    load_class(source)
    kept = source.as_imported()
    assert {Path(path).name for path in kept.modules} == {"helper.py", "deeper.py"}
    written(tmp_path / "a", deeper="V = 2", task=task)
    assert load_class(kept).value == 1  # type: ignore[attr-defined]
    assert load_class(source).value == 2  # type: ignore[attr-defined]


def test_a_run_of_before_modules_were_kept_has_those_that_are_there_under_its_own_names(tmp_path: Path) -> None:
    values = []
    for value in (1, 2):
        task = "from helper import V\nclass Mine:\n    value = V"
        described = written(tmp_path / str(value), task=task, helper=f"V = {value}").to_json()
        del described["modules"]
        values.append(load_class(TaskSource.from_json(described)).value)  # type: ignore[attr-defined]
    assert values == [1, 2]
    assert "helper" not in sys.modules


def test_threads_that_import_codes_at_once_get_whole_modules_each_once(tmp_path: Path) -> None:
    task = "import time\nimport helper\ntime.sleep(0.02)\nclass Mine:\n    value = helper.V"
    sources = [written(tmp_path / str(v), task=task, helper=f"import time\ntime.sleep(0.02)\nV = {v}") for v in (1, 2)]
    together, made = threading.Barrier(6), dict[int, Any]()

    def load(index: int) -> None:
        together.wait()
        made[index] = load_class(sources[index % 2])

    threads = [threading.Thread(target=load, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [made[index].value for index in range(6)] == [1, 2] * 3
    assert len(set(made.values())) == 2


@pytest.mark.parametrize("named", ["import net\n", ""])
@pytest.mark.parametrize("call", ["pickle.load(file)", "pickle._Unpickler(file).load()"])
def test_objects_that_others_have_pickled_are_of_the_modules_beside(tmp_path: Path, call: str, named: str) -> None:
    net = "class Net:\n    V = {}"
    found = []
    for value in (1, 2):
        folder = tmp_path / str(value)
        task = (
            f"{named}import pickle\nwith open('{folder}/net.bin', 'rb') as file:\n    object = {call}\n"
            "from net import Net\nclass Mine:\n    same, value = type(object) is Net, object.V"
        )
        source = written(folder, task=task, net=net.format(value))
        (folder / "net.bin").write_bytes(b"cnet\nNet\n)\x81.")  # as a script of the user's pickles net.Net()
        made: Any = load_class(source)
        found.append((made.same, made.value))
    assert found == [(True, 1), (True, 2)]


def test_compiled_modules_beside_have_names_of_their_own(tmp_path: Path) -> None:
    built = Path(markupsafe.__file__).parent.glob("_speedups.*.so")
    for place in (tmp_path, tmp_path / "lib"):
        place.mkdir(exist_ok=True)
        shutil.copy(next(built) if place == tmp_path else next(tmp_path.glob("*.so")), place)
    script = written(tmp_path, task="import _speedups\nclass Mine:\n    module = _speedups")
    inside = "from . import names\nfrom ._speedups import __name__ as own\nclass Mine:\n    name = own"
    module = written(tmp_path, "lib/task.py:Mine", lib__init="", lib__task=inside, lib__names="")
    assert load_class(script).module.__file__.startswith(str(tmp_path))  # type: ignore[attr-defined]
    assert load_class(module).name.endswith(".lib._speedups")  # type: ignore[attr-defined]
    assert "_speedups" not in sys.modules


def test_imports_within_functions_find_the_same_modules(tmp_path: Path) -> None:
    text = """
import shared
class Mine:
    def late(self):
        import shared as again
        import shared.deep
        from helper import value
        return again is shared, shared.deep.VALUE, value()
"""
    helper = "def value():\n    import shared\n    return shared.NAME"
    made: Any = load_class(
        sent(tmp_path / "a", task=text, helper=helper, shared__init="NAME = 'own'", shared__deep="VALUE = 7")
    )
    assert made().late() == (True, 7, "own")


def test_a_module_of_a_package_has_relative_imports_and_runs_the_package_first(tmp_path: Path) -> None:
    texts = {
        "lib__init": "ORDER = ['package']",
        "lib__net": "from . import ORDER\nORDER.append(__name__.rpartition('.')[2])\nclass Net: pass",
        "lib__task": "from . import ORDER\nfrom .net import Net\nimport lib.net\n"
        "class Mine:\n    order, same = ORDER, lib.net.Net is Net",
    }
    made: Any = load_class(sent(tmp_path / "a", "lib/task.py:Mine", **texts))
    assert made.order == ["package", "net"]
    assert made.same


def test_a_module_beside_wins_over_one_of_the_same_name_for_its_own_code_alone(tmp_path: Path) -> None:
    made: Any = load_class(
        sent(tmp_path / "a", task="import colorsys\nclass Mine:\n    name = colorsys.NAME", colorsys="NAME = 'mine'")
    )
    import colorsys

    assert made.name == "mine"
    assert hasattr(colorsys, "rgb_to_hsv")


def test_objects_of_modules_beside_can_be_pickled_and_modules_know_their_file(tmp_path: Path) -> None:
    net = "import dataclasses\n@dataclasses.dataclass\nclass Net:\n    width: int = 3\nFILE = __file__"
    made: Any = load_class(sent(tmp_path / "a", task="import net\nclass Mine(net.Net):\n    file = net.FILE", net=net))
    assert pickle.loads(pickle.dumps(made(width=5))).width == 5  # noqa: S301 - pickled a moment ago
    assert made.file == str(tmp_path / "a" / "net.py")


def test_functions_of_modules_beside_reach_processes_that_do_not_have_them(tmp_path: Path) -> None:
    from ray import cloudpickle

    helper = "FACTOR = 3\ndef times(x):\n    return FACTOR * x"
    task = "import helper\nclass Mine:\n    call = helper.times"
    made: Any = load_class(sent(tmp_path / "a", task=task, helper=helper))
    call = [sys.executable, "-c", "import pickle, sys; print(pickle.load(sys.stdin.buffer)(14))"]
    assert subprocess.check_output(call, input=cloudpickle.dumps(made.call)) == b"42\n"


def test_a_package_finds_its_data_and_its_source_where_the_files_are(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "words.txt").write_text("one two")
    (tmp_path / "lib" / "__init__.py").write_text("")
    (tmp_path / "lib" / "task.py").write_text(
        "import inspect, pkgutil\nfrom importlib import resources\nfrom . import __doc__\nclass Mine:\n"
        "    by_resources = resources.files(__package__).joinpath('words.txt').read_text()\n"
        "    by_pkgutil = pkgutil.get_data(__package__, 'words.txt')\n"
    )
    made: Any = load_class(TaskSource.of_class(f"{tmp_path}/lib/task.py:Mine", {}))
    assert (made.by_resources, made.by_pkgutil) == ("one two", b"one two")
    assert inspect.getsource(made).startswith("class Mine:")


def test_what_fails_in_a_module_beside_is_told_with_its_file_and_line(tmp_path: Path) -> None:
    source = sent(tmp_path / "a", task="import net", net="\n\n1 / 0\n")
    file = tmp_path / "a" / "net.py"
    with pytest.raises(TaskError, match=rf"does not import: ZeroDivisionError: division by zero \({file}, line 3\)$"):
        load_class(source)


def test_a_module_that_was_not_there_is_named_as_the_user_knows_it(tmp_path: Path) -> None:
    source = sent(tmp_path / "a", "lib/task.py:Mine", lib__task="from .models import Net", lib__init="")
    with pytest.raises(TaskError, match=r"ModuleNotFoundError: No module named 'lib\.models' was found beside"):
        load_class(source)
    missing = sent(tmp_path / "b", task="from net import Net", net="")
    with pytest.raises(TaskError, match=r"ImportError: cannot import name 'Net' from 'net' \(.*net\.py\)"):
        load_class(missing)


def test_a_model_of_own_modules_compiles(tmp_path: Path) -> None:
    net = """
import torch
from ops import twice
class Net(torch.nn.Module):
    def forward(self, x):
        return twice(x) + len([1])
"""
    ops = "import torch\ndef twice(x):\n    return torch.add(x, x)"
    made: Any = load_class(sent(tmp_path / "a", task="from net import Net as Mine", net=net, ops=ops))
    x = torch.ones(2)
    assert torch.equal(torch.compile(made(), backend="eager", fullgraph=True)(x), made()(x))
