"""A class or a function of the user's own, which answers batches of whatever is sent, or of arrays."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from orchestray.platform.errors import TaskError
from orchestray.serving.models.codec import Codec
from orchestray.serving.models.content import content_of
from orchestray.serving.models.errors import InputError, ModelError, RequestError
from orchestray.serving.models.json_values import json_values
from orchestray.serving.models.load import load_served_model
from orchestray.serving.models.own_class import OwnModel, load_own_model
from orchestray.serving.models.signature import ANY, boxed

MODULE = """
import numpy as np
import pandas as pd
import torch

class Lengths:
    def __init__(self, more=0):
        self.more = more
    def predict(self, batch):
        assert type(batch) is list
        return [len(text) + self.more for text in batch]

class Scaled:
    class_names = ["a", "b"]
    def example_inputs(self):
        return np.ones(2, np.float32)
    def predict(self, batch):
        assert batch.dtype == np.float32 and batch.ndim == 2
        return 2 * batch

class Added:
    def example_inputs(self):
        return {"left": np.ones(2), "right": 1}
    def predict(self, batch):
        return {"sum": batch["left"].sum(1) + batch["right"], "texts": ["x"] * len(batch["right"])}

class Columns:
    def predict(self, batch):
        return {"label": np.array(["yes"] * len(batch)), "score": np.arange(len(batch)) / 2}

def framed(batch):
    return pd.DataFrame({"length": [len(text) for text in batch], "text": batch})

def half(batch):
    return torch.ones(len(batch), 2, dtype=torch.bfloat16, requires_grad=True)

def echo(batch):
    return batch

def dated(batch):
    return pd.DataFrame({"day": pd.to_datetime(batch), "n": range(len(batch))})

def numbered(batch):
    return pd.DataFrame({"id": pd.array(batch, "Int64")})

def stamped(batch):
    return np.array(batch, "M8[ns]")

def lasted(batch):
    return {"took": np.array(batch, "m8[ns]")}

def whole(batch):
    return np.zeros(())

class Long:
    def example_inputs(self): return np.zeros(2)
    def predict(self, batch): return batch.astype(np.longdouble)

class Answer:
    def __init__(self, text): self.text = text
    def _asdict(self): return {"text": self.text}

def of_its_own(batch):
    return map(Answer, batch)

class Foreign:
    # a tensor of a library that numpy can read
    def __init__(self, values): self.values = np.asarray(values, np.float32)
    def __array__(self, dtype=None, copy=None): return self.values
    def __len__(self): return len(self.values)
    def __getitem__(self, row): return Foreign(self.values[row])

class Tensors:
    def example_inputs(self): return np.zeros(2)
    def predict(self, batch): return {"whole": Foreign(batch), "rows": [Foreign(row) for row in batch]}

def endless(batch):
    while True:
        yield 1

def popped(batch):
    found = [row.pop("x") for row in batch]
    assert None not in found
    return found

class Reused:
    def __init__(self): self.buffer = np.zeros((4, 2))
    def example_inputs(self): return np.zeros(2)
    def predict(self, batch):
        self.buffer[:len(batch)] = batch
        return self.buffer[:len(batch)]

class Popped:
    example_request = {"x": 1}
    def predict(self, batch): return popped(batch)

class Exits:
    def __init__(self): raise SystemExit(2)

class ExitsLater(Scaled):
    def predict(self, batch): raise SystemExit(2)

async def later(batch):
    return batch

class Steps:
    async def predict(self, batch):
        yield batch

class WithContext:
    def predict(self, context, batch): return batch

class Numbered:
    class_names = {"a", "b"}
    def predict(self, batch): return batch

class Untrained:
    def example_inputs(self): return self.example
    def predict(self, batch): return batch

class Texts(Untrained):
    example = "abc"

class Empty(Untrained):
    example = {}

class Unsendable(Untrained):
    example_inputs = None
    example_request = {"a": object()}

class Arrays:
    class_names = np.array(["a", "b"])
    def example_inputs(self): return {"x": torch.ones(2, dtype=torch.bfloat16, requires_grad=True)}
    def predict(self, batch): return batch

class Positive:
    def predict(self, batch):
        for value in batch:
            if value < 0:
                raise ValueError(f"wanted a positive number, got {value}")
        return batch

class Refuses(Positive):
    example_request = -2

class Nothing: ...

class Short(Scaled):
    def predict(self, batch):
        return batch[:0]

constant = 1

added = Lengths(2)  # an object, as a fitted estimator is one
called = Lengths(3).predict

class Network(torch.nn.Linear):
    def __init__(self): super().__init__(2, 1)

network = Network()

class Predicting(Network):
    def predict(self, batch): return self(torch.tensor(batch)).shape[1:] * len(batch)

predicting = Predicting()
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(MODULE)
    return file


def load(file: Path, name: str, **arguments: Any) -> OwnModel:
    return load_own_model(f"{file}:{name}", arguments, name="own")


def ask(model: OwnModel, *values: Any) -> list[Any]:
    """Return the answers as JSON values, and errors as they are."""
    answers, answer_of = model.run([model.signature.parse(value) for value in values]), Codec(model.signature).answer_of
    return [each if isinstance(each, Exception) else json_values(asyncio.run(answer_of(each))) for each in answers]


def test_a_class_without_an_example_gets_the_values_that_were_sent_in_a_list(file: Path) -> None:
    assert ask(load(file, "Lengths", more=1), "ab", [1, 2, 3]) == [3, 4]
    assert ask(load(file, "framed"), "a", "bc") == [{"length": 1, "text": "a"}, {"length": 2, "text": "bc"}]
    assert ask(load(file, "half"), None) == [[1.0, 1.0]]
    assert ask(load(file, "echo"), {"a": [None, "b"]}, 1.5) == [{"a": [None, "b"]}, 1.5]
    assert ask(load(file, "Columns"), 0, 0) == [{"label": "yes", "score": 0.0}, {"label": "yes", "score": 0.5}]


@pytest.mark.parametrize(("name", "wanted"), [("added", 5), ("called", 6)])
def test_an_object_with_predict_is_served_as_one_that_its_class_makes(file: Path, name: str, wanted: int) -> None:
    assert ask(load(file, name), "abc") == [wanted]


def test_a_network_with_predict_is_an_object_as_any(file: Path) -> None:
    assert ask(load(file, "predicting"), [0.5, 2.0]) == ask(load(file, "Predicting"), [0.5, 2.0]) == [1]


def test_a_class_with_an_example_gets_checked_arrays_and_has_types_of_its_own(file: Path) -> None:
    model = load(file, "Scaled")
    assert ask(model, [1, 2], [3.5, 4]) == [[2, 4], [7, 8]]
    assert [str(spec) for spec in (*model.signature.inputs, *model.signature.outputs)] == ["float32 of shape [2]"] * 2
    assert model.signature.class_names == ("a", "b")
    with pytest.raises(InputError, match="float32 of shape"):
        model.signature.parse([1, 2, 3])
    several = load(file, "Added")
    assert ask(several, {"left": [1, 2], "right": 3}) == [{"sum": 6.0, "texts": "x"}]
    assert [spec.dtype for spec in several.signature.outputs] == ["float64", ANY]


def test_tensors_of_any_library_that_numpy_reads_are_arrays(file: Path) -> None:
    model = load(file, "Tensors")
    assert [str(spec) for spec in model.signature.outputs] == ["float32 of shape [2]"] * 2
    assert ask(model, [1, 2]) == [{"whole": [1.0, 2.0], "rows": [1.0, 2.0]}]


def test_examples_may_be_tensors_and_class_names_an_array(file: Path) -> None:
    signature = load(file, "Arrays").signature
    assert (signature.example, signature.class_names) == ([1.0, 1.0], ("a", "b"))


def test_a_sample_on_which_it_raises_fails_alone(file: Path) -> None:
    first, failed, last = ask(load(file, "Lengths"), "a", None, "abc")
    assert (first, last) == (1, 3)
    assert isinstance(failed, ModelError)
    assert "TypeError" in str(failed)


def test_a_value_error_is_the_fault_of_its_sample_alone_and_told_in_the_models_words(file: Path) -> None:
    first, refused, last = ask(load(file, "Positive"), 1, -2, 3)
    assert (first, last) == (1, 3)
    assert isinstance(refused, RequestError)
    assert str(pickle.loads(pickle.dumps(refused))) == "wanted a positive number, got -2"  # noqa: S301


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("Refuses", {}, r"does not answer its example: ValueError: wanted a positive number, got -2 \(.*own.py, line"),
        ("Nothing", {}, r"lacks the method predict\(batch\)"),
        ("constant", {}, r"int lacks the method predict\(batch\)"),
        ("Network", {}, r"Network lacks the method predict\(batch\).*: it makes a tensor of the batch"),
        ("network", {}, r"Network lacks the method predict\(batch\).*: it makes a tensor of the batch"),
        ("added", {"more": 1}, "it is no class, and takes no arguments"),
        ("Length", {}, "there is no class Length .*Lengths"),
        ("Lengths", {"most": 1}, "unexpected keyword argument 'most'"),
        ("echo", {"more": 1}, "it is no class, and takes no arguments"),
        ("Untrained", {}, r"AttributeError: .* no attribute 'example' \(.*own.py, line"),
        ("Texts", {}, "must return numbers or arrays of them, got one <U3"),
        ("Empty", {}, "must return numbers or arrays of them, got none"),
        ("Unsendable", {}, "TypeError: Type is not JSON serializable: object$"),
        ("Exits", {}, "SystemExit: 2"),
        ("ExitsLater", {}, "does not answer its example: SystemExit: 2"),
        ("later", {}, "predict is async"),
        ("Steps", {}, "predict is async"),
        ("WithContext", {}, r"predict\(context, batch\) must be callable as 'predict\(batch\)'"),
        ("Numbered", {}, "class_names must be a list of names in their order, got a set"),
        (
            "Short",
            {},
            "does not answer its example: predict must return an answer for each of the 1 samples, and returned 0$",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(
    file: Path, name: str, arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises(TaskError, match=told):
        load(file, name, **arguments)


def test_a_model_may_change_the_batch_that_it_gets(file: Path) -> None:
    first, failed, last = ask(load(file, "popped"), {"x": 1}, {"x": None}, {"x": 3})
    assert (first, last) == (1, 3)
    assert isinstance(failed, ModelError)
    model = load(file, "Popped")
    assert model.signature.example == {"x": 1}
    assert ask(model, model.signature.example) == [1]


def test_answers_do_not_change_when_the_model_reuses_its_memory(file: Path) -> None:
    model = load(file, "Reused")
    (answer,) = model.run([model.signature.parse([1, 2])])
    model.run([model.signature.parse([3, 4])])
    assert isinstance(answer, dict)
    assert answer["outputs"].tolist() == [1, 2]


def test_answers_are_json_values_that_a_process_without_the_models_code_reads(file: Path) -> None:
    answers = load(file, "of_its_own").run([{"inputs": boxed("a")}])
    assert [each["outputs"].item() for each in answers if isinstance(each, dict)] == [{"text": "a"}]
    days = ask(load(file, "dated"), "2024-01-01", None)
    assert days == [{"day": "2024-01-01T00:00:00", "n": 0}, {"day": None, "n": 1}]
    assert ask(load(file, "numbered"), 2**53 + 1, None) == [{"id": 2**53 + 1}, {"id": None}]
    assert ask(load(file, "stamped"), "2024-01-01", "NaT") == ["2024-01-01T00:00:00", None]
    assert ask(load(file, "lasted"), 1_500_000_000, "NaT") == [{"took": "PT1.5S"}, {"took": None}]


def test_an_answer_to_all_is_none_to_each(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    (failed,) = ask(load(file, "whole"), 1)
    assert isinstance(failed, ModelError)
    assert "an answer for each of the 1 samples, and returned a ndarray" in caplog.text


def test_numbers_of_a_type_that_the_protocols_lack_are_json_values(file: Path) -> None:
    model = load(file, "Long")
    assert [spec.dtype for spec in model.signature.outputs] == [ANY]
    assert ask(model, [0.5, 2]) == [[0.5, 2.0]]


def test_more_answers_than_samples_are_refused_without_waiting_for_the_last(file: Path) -> None:
    (failed,) = ask(load(file, "endless"), 1)
    assert isinstance(failed, ModelError)
    assert "returned more" in str(failed.__cause__)


@pytest.mark.parametrize("answered", [[1], "ab", 2.0, np.ones(()), {"a", "b"}, {}])
def test_a_batch_of_which_not_each_sample_is_answered_fails(answered: Any) -> None:
    model = OwnModel(lambda _batch: answered, object(), name="own")
    one, other = model.run([{"inputs": boxed(0)}, {"inputs": boxed(1)}])
    if isinstance(answered, list):  # each alone is answered
        assert not isinstance(one, Exception)
    else:
        assert isinstance(one, ModelError)
        assert isinstance(other, ModelError)


class Pair(NamedTuple):
    labels: Any
    scores: Any


def test_a_named_tuple_of_arrays_has_outputs_by_name() -> None:
    model = OwnModel(lambda batch: Pair(np.array(batch), [[each, 0.5] for each in batch]), object(), name="own")
    answers = model.run([{"inputs": boxed(each)} for each in (1, 2)])
    found = [each["outputs"].item() for each in answers if isinstance(each, dict)]
    assert found == [{"labels": 1, "scores": [1, 0.5]}, {"labels": 2, "scores": [2, 0.5]}]


@pytest.mark.parametrize("num_samples", [1, 2, 3])
def test_a_tuple_of_arrays_is_refused_however_many_samples_there_are(num_samples: int) -> None:
    model = OwnModel(lambda batch: (np.array(batch), -np.array(batch)), object(), name="own")
    answers = model.run([{"inputs": boxed(each)} for each in range(num_samples)])
    assert all(isinstance(each, ModelError) and "tuple of arrays" in str(each.__cause__) for each in answers)


def test_its_content_is_that_of_its_file_and_of_the_modules_beside_it(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("factor = 2\n")
    (tmp_path / "own.py").write_text(
        "from helper import factor\n\ndef scaled(batch):\n    return [factor * x for x in batch]\n"
    )
    run = f"{tmp_path / 'own.py'}:scaled"
    first, content = load_own_model(run, {}, name="own"), content_of(run)
    (tmp_path / "helper.py").write_text("factor = 3\n")
    assert content_of(run) != content
    assert ask(first, 1) == [2]
    assert ask(load_own_model(run, {}, name="own"), 1) == [3]


def test_a_class_that_was_edited_is_refused_to_who_wants_the_one_that_was_there_before(tmp_path: Path) -> None:
    own, helper = tmp_path / "own.py", tmp_path / "helper.py"
    texts = {own: "from helper import answer\n\ndef served(batch):\n    return answer(batch)\n"}
    texts[helper] = "def answer(batch):\n    return batch\n"
    for file, text in texts.items():
        file.write_text(text)
    run = f"{own}:served"
    content = content_of(run)
    for file, text in texts.items():
        file.write_text(text + "# edited\n")
        with pytest.raises(TaskError, match=r"own\.py, .* was written anew since this version was started.*--update"):
            load_served_model(run, content=content)
        assert ask(load_served_model(run), 1) == [1]
        file.write_text(text)
    assert ask(load_served_model(run, content=content), 1) == [1]


def test_a_refusal_without_a_text_says_that_the_model_gave_none() -> None:
    def refuse(_: Any) -> Any:
        raise ValueError

    (refused,) = OwnModel(refuse, None, name="own").run([{"inputs": boxed(1)}])
    assert isinstance(refused, RequestError)
    assert "does not say why" in str(refused)


def test_what_a_masked_array_hides_is_missing_in_the_answer() -> None:
    class Masked:
        def example_inputs(self) -> Any:
            return np.zeros(2)

        def predict(self, batch: Any) -> Any:
            return {"row": np.ma.masked_greater(batch, 1), "sum": np.ma.masked_greater(batch.sum(1), 1)}

    model = OwnModel(Masked().predict, Masked(), name="own")
    assert ask(model, [0.5, 0.25], [0.5, 2]) == [{"row": [0.5, 0.25], "sum": 0.75}, {"row": [0.5, None], "sum": None}]


def test_a_value_error_of_a_generator_is_the_fault_of_its_sample_alone() -> None:
    def halves(batch: list[Any]) -> Any:
        for each in batch:
            if each % 2:
                raise ValueError(f"{each} is odd")
            yield each // 2

    answers = ask(OwnModel(halves, None, name="own"), 2, 3, 4)
    assert [str(each) for each in answers] == ["1", "3 is odd", "2"]
    assert isinstance(answers[1], RequestError)
