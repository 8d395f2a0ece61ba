"""The task `parquet`: a user's own table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch

from orchestray.platform.data.source import open_source
from orchestray.platform.data.stream import SampleStream
from orchestray.platform.errors import DataError, TaskError
from orchestray.trainers.tasks import parquet_files
from orchestray.trainers.tasks.parquet import ParquetTable


def people(rows: int = 40, start: int = 0) -> pa.Table:
    number = np.arange(start, start + rows)
    return pa.table(
        {
            "number": number,
            "height": number / 7,
            "tall": number % 3 == 0,
            "name": [f"n{n}" for n in number],
            "pixels": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(number, 2).astype(np.float32)), 2),
            "kind": [("cat", "dog", "eel")[n % 3] for n in number],
            "grade": number % 4 + 5,
        }
    )


@pytest.fixture
def table(tmp_path: Path) -> str:
    pq.write_table(people(), tmp_path / "people.parquet")
    return str(tmp_path / "people.parquet")


def rows_of(data: pa.Table | ds.Dataset) -> pa.Table:
    return data if isinstance(data, pa.Table) else data.to_table()


def test_by_default_every_column_of_numbers_but_the_label_is_a_feature(table: str) -> None:
    task = ParquetTable(table, label="grade")
    assert task.features == ["number", "height", "tall", "pixels"]
    rows = task.dataset("train")
    batch = task.to_batch(rows)
    assert batch["inputs"].shape == (36, 5)
    assert batch["inputs"].dtype == torch.float32
    wanted = [[r["number"], r["height"], r["tall"], *r["pixels"]] for r in rows.to_pylist()]
    np.testing.assert_allclose(batch["inputs"].numpy(), np.array(wanted, dtype=np.float32))


def test_the_index_of_a_pandas_frame_is_a_feature_only_if_it_is_named(tmp_path: Path) -> None:
    frame = people().to_pandas().drop(columns="pixels")
    file = tmp_path / "filtered.parquet"
    frame[frame["number"] % 5 != 3].to_parquet(file)
    index = "__index_level_0__"
    assert index in pq.read_schema(file).names
    assert ParquetTable(str(file), label="grade").features == ["number", "height", "tall"]
    assert ParquetTable(str(file), label="grade", features=[index]).features == [index]


@pytest.mark.parametrize("kind", [pa.string_view(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())])
def test_classes_are_texts_of_any_type(tmp_path: Path, kind: pa.DataType) -> None:
    table = people()
    labels = table["kind"].combine_chunks().cast(kind)
    pq.write_table(table.set_column(5, "kind", labels), tmp_path / "people.parquet")
    task = ParquetTable(str(tmp_path / "people.parquet"), label="kind")
    train = rows_of(task.dataset("train"))
    targets = task.to_batch(train)["targets"].tolist()
    assert [task.classes[target] for target in targets] == train["kind"].to_pylist()


@pytest.mark.parametrize("features", ["pixels", ["pixels"]])
def test_a_single_feature_of_floats_is_not_copied(table: str, features: Any) -> None:
    task = ParquetTable(table, label="kind", features=features)
    rows = task.dataset("train")
    assert rows.column_names == ["pixels", "kind"]
    assert task.to_batch(rows)["inputs"].data_ptr() == rows["pixels"].chunk(0).flatten().buffers()[1].address


@pytest.mark.parametrize(("label", "classes"), [("kind", ["cat", "dog", "eel"]), ("grade", [5, 6, 7, 8])])
def test_classes_are_the_sorted_values_of_the_label(table: str, label: str, classes: list[Any]) -> None:
    task = ParquetTable(table, label=label, hidden=[3])
    assert task.classes == classes
    rows = task.dataset("train")
    batch = task.to_batch(rows)
    assert [classes[index] for index in batch["targets"]] == rows[label].to_pylist()
    outputs = task.build_model()(batch["inputs"])
    assert outputs.shape == (36, len(classes))
    assert set(task.metrics(outputs, batch)) == {"accuracy"}
    assert task.loss(outputs, batch).shape == ()


def test_with_num_classes_whole_numbers_are_the_classes_themselves(table: str) -> None:
    task = ParquetTable(table, label="grade", num_classes=9)
    rows = task.dataset("train")
    assert task.to_batch(rows)["targets"].tolist() == rows["grade"].to_pylist()
    assert task.build_model()(task.example_inputs()[None]).shape == (1, 9)
    too_few = ParquetTable(table, label="grade", num_classes=7)
    with pytest.raises(DataError, match=r"the label 'grade' has the value [78], which is no class: classes are 0 to 6"):
        too_few.to_batch(too_few.dataset("train"))


def test_categories_and_truth_values_are_classes_too(tmp_path: Path) -> None:
    rows = people()
    rows = rows.set_column(5, "kind", rows["kind"].dictionary_encode())
    pq.write_table(rows, tmp_path / "rows.parquet")
    for label, classes in (("kind", ["cat", "dog", "eel"]), ("tall", [False, True])):
        task = ParquetTable(str(tmp_path / "rows.parquet"), label=label)
        assert task.classes == classes
        part = rows_of(task.dataset("train"))
        assert [classes[index] for index in task.to_batch(part)["targets"]] == part[label].to_pylist()


def test_a_class_that_only_rows_held_out_have_is_a_class(tmp_path: Path) -> None:
    whole = people(20)
    path = str(tmp_path / "rows.parquet")
    pq.write_table(whole, path)
    held_out = rows_of(ParquetTable(path, "number").dataset("validation"))["number"].to_pylist()
    kinds = ["rare" if number == held_out[0] else "often" for number in whole["number"].to_pylist()]
    pq.write_table(whole.append_column("class", pa.array(kinds)), path)
    assert ParquetTable(path, "class").classes == ["often", "rare"]


def test_regression_predicts_a_number(table: str) -> None:
    task = ParquetTable(table, label="height", features=["number"], kind="regression", hidden=[])
    rows = task.dataset("validation")
    batch = task.to_batch(rows)
    np.testing.assert_allclose(batch["targets"].numpy(), rows["height"].to_numpy().astype(np.float32))
    outputs = task.build_model()(batch["inputs"]).detach()
    assert outputs.shape == (4, 1)
    error = outputs.squeeze(1) - batch["targets"]
    assert float(task.loss(outputs, batch)) == pytest.approx(float((error**2).mean()), rel=1e-6)
    assert float(task.metrics(outputs, batch)["absolute_error"]) == pytest.approx(float(error.abs().mean()), rel=1e-6)


def test_a_table_is_parted_by_rows_each_in_one_part_always_the_same(table: str) -> None:
    parts = [
        ParquetTable(table, label="kind").dataset(split)["number"].to_pylist() for split in ("train", "validation")
    ]
    assert [len(part) for part in parts] == [36, 4]
    assert sorted(parts[0] + parts[1]) == list(range(40))
    assert ParquetTable(table, label="kind").dataset("validation")["number"].to_pylist() == parts[1]


def test_what_does_not_fit_a_window_is_parted_by_row_groups_and_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in range(3):
        pq.write_table(people(100, 100 * part), tmp_path / f"{part}.parquet", row_group_size=10)
    monkeypatch.setattr(parquet_files, "WINDOW_ROWS", 50)
    task = ParquetTable(str(tmp_path), label="kind", validation_fraction=0.2)
    parts = {split: task.dataset(split) for split in ("train", "validation")}
    numbers = {}
    for split, data in parts.items():
        assert isinstance(data, ds.Dataset)
        assert "name" not in data.schema.names
        stream = SampleStream(open_source(data, window_rows=50), task.to_batch, batch_size=7)
        with stream.epoch(0) as shares:
            numbers[split] = sorted(int(n) for share in shares for n in share.micro_batches[0].batch["inputs"][:, 0])
        assert numbers[split] == sorted(rows_of(data)["number"].to_pylist())
    assert len(numbers["validation"]) == 60
    assert sorted(numbers["train"] + numbers["validation"]) == list(range(300))
    groups = {number // 10 for number in numbers["validation"]}
    assert len(groups) == 6
    assert len({group // 10 for group in groups}) > 1  # not all of one file
    assert task.classes == ["cat", "dog", "eel"]


def test_a_table_of_its_own_to_validate_on(tmp_path: Path, table: str) -> None:
    pq.write_table(people(5, 100), tmp_path / "more.parquet")
    task = ParquetTable(table, label="kind", validation_path=str(tmp_path / "more.parquet"))
    assert rows_of(task.dataset("train"))["number"].to_pylist() == list(range(40))
    assert rows_of(task.dataset("validation"))["number"].to_pylist() == list(range(100, 105))


def test_a_table_to_validate_on_may_keep_the_same_values_in_other_types(tmp_path: Path, table: str) -> None:
    other = people()
    kinds = {"kind": pa.string_view(), "height": pa.float32(), "number": pa.int16()}
    for name, kind in kinds.items():
        other = other.set_column(other.schema.get_field_index(name), name, other[name].cast(kind))
    pq.write_table(other, tmp_path / "other.parquet")
    task = ParquetTable(table, label="kind", validation_path=str(tmp_path / "other.parquet"))
    train, validation = (task.to_batch(rows_of(task.dataset(split))) for split in ("train", "validation"))
    assert torch.equal(train["inputs"], validation["inputs"])
    assert torch.equal(train["targets"], validation["targets"])


def test_a_label_of_another_type_than_the_classes_is_refused_by_its_name(table: str) -> None:
    texts = people(3).drop_columns("grade").append_column("grade", pa.array(["five", "six", "seven"]))
    with pytest.raises(DataError, match="the label 'grade' is of type string, and the classes are 5, 6, 7, 8"):
        ParquetTable(table, label="grade").to_batch(texts)


@pytest.mark.parametrize("kind", ["file", "folder", "uri", "hive"])
def test_path_is_a_file_a_folder_or_a_uri(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "data"
    for part in ("a=1", "a=2"):
        (folder / part).mkdir(parents=True)
        pq.write_table(people(10), folder / part / "rows.parquet")
    path = {"file": str(folder / "a=1" / "rows.parquet"), "uri": folder.as_uri()}.get(kind, str(folder))
    task = ParquetTable(path, label="kind", features=["number", *(["a"] if kind == "hive" else [])])
    batch = task.to_batch(rows_of(task.dataset("train")))
    assert batch["inputs"].shape == ((9, 1) if kind == "file" else (18, 2) if kind == "hive" else (18, 1))


def test_the_model_is_built_where_the_data_is_not(table: str) -> None:
    given: dict[str, Any] = {"path": table, "label": "kind", "hidden": [4]}
    task = ParquetTable(**given)
    found = task.rebuild_arguments()
    assert found == {
        "features": ["number", "height", "tall", "pixels", "grade"],
        "num_inputs": 6,
        "classes": ["cat", "dog", "eel"],
    }
    assert task.feature_names == {"number": 1, "height": 1, "tall": 1, "pixels": 2, "grade": 1}
    Path(table).unlink()
    again = ParquetTable(**{**given, **found})
    assert again.feature_names == {}
    assert [p.shape for p in again.build_model().parameters()] == [p.shape for p in task.build_model().parameters()]
    assert torch.equal(again.to_batch(people(3))["targets"], torch.tensor([0, 1, 2]))


def test_nan_passes_and_a_null_is_refused_by_name(tmp_path: Path) -> None:
    rows = pa.table({"x": [1.0, float("nan"), 3.0], "holed": [1, None, 3], "y": ["a", "b", None]})
    pq.write_table(rows, tmp_path / "rows.parquet")
    path = str(tmp_path / "rows.parquet")
    known: dict[str, Any] = {"label": "y", "classes": ["a", "b"]}
    batch = ParquetTable(path, features="x", **known).to_batch(rows.slice(0, 2))
    assert torch.isnan(batch["inputs"]).flatten().tolist() == [False, True]
    with pytest.raises(DataError, match=r"column 'holed' has 1 null\(s\)"):
        ParquetTable(path, **known).to_batch(rows)
    with pytest.raises(DataError, match=r"column 'y' has 1 null\(s\): fill or drop them"):
        ParquetTable(path, features="x", **known).to_batch(rows)


# -- what is wrong with what the user gave -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"label": "knid"},
            r"there is no column 'knid' in .*people\.parquet \(did you mean 'kind'\?\); it has number, height",
        ),
        (
            {"label": "kind", "features": ["zzz"]},
            r"there is no column 'zzz' in .*people\.parquet; it has number, height",
        ),
        (
            {"label": "kind", "features": ["name"]},
            r"task\.features: column 'name' of .* is of type string; wanted numbers",
        ),
        (
            {"label": "kind", "features": ["kind"]},
            r"task\.features: 'kind' is the label; it cannot be predicted from itself",
        ),
        (
            {"label": "height"},
            r"task\.label: column 'height' is of type double; classes are whole .* task\.kind=regression",
        ),
        (
            {"label": "kind", "kind": "regression"},
            r"task\.label: column 'kind' is of type string; regression predicts a number",
        ),
        (
            {"label": "kind", "num_classes": 2},
            r"task\.num_classes is 2, but the label 'kind' has 3 values: 'cat', 'dog'",
        ),
        ({"label": "kind", "kind": "ranking"}, r"task\.kind must be 'classification' or 'regression', got 'ranking'"),
    ],
)
def test_wrong_arguments_are_said_in_a_sentence(table: str, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TaskError, match=sentence):
        ParquetTable(table, **arguments).build_model()


def test_a_missing_column_is_found_by_dataset_already(table: str) -> None:
    with pytest.raises(TaskError, match="there is no column 'knid'"):
        ParquetTable(table, label="knid").dataset("train")


def test_a_validation_table_without_the_columns_is_refused(tmp_path: Path, table: str) -> None:
    other = tmp_path / "other.parquet"
    pq.write_table(people().drop_columns(["height"]), other)
    with pytest.raises(TaskError, match=rf"there is no column 'height' in {re.escape(str(other))}"):
        ParquetTable(table, label="kind", validation_path=str(other)).dataset("validation")


def test_a_label_the_training_rows_do_not_have_is_named(tmp_path: Path, table: str) -> None:
    task = ParquetTable(table, label="kind")
    odd = people(3).set_column(5, "kind", pa.array(["cat", "yak", "dog"]))
    with pytest.raises(DataError, match="the label 'kind' has the value 'yak', which is no class: classes are 'cat', "):
        task.to_batch(odd)


def test_a_label_with_one_value_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1.0, 2.0, 3.0], "y": [1, 1, 1]}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"the label 'y' of .* has no two values: there is nothing to learn"):
        ParquetTable(str(tmp_path / "rows.parquet"), label="y").build_model()


def test_a_table_with_nothing_to_predict_from_is_refused(tmp_path: Path) -> None:
    pq.write_table(people().select(["name", "kind"]), tmp_path / "rows.parquet")
    with pytest.raises(TaskError, match="has no column of numbers beside the label 'kind' to predict from"):
        ParquetTable(str(tmp_path / "rows.parquet"), label="kind").build_model()


@pytest.mark.parametrize("size", [3, 100, -1])
def test_a_truncated_file_is_named(table: str, size: int) -> None:
    whole = Path(table).read_bytes()
    Path(table).write_bytes(whole[:size])
    with pytest.raises(DataError, match=rf"cannot read {re.escape(table)}: Could not open Parquet.*Is the file whole"):
        ParquetTable(table, label="kind").dataset("train")


def test_a_path_that_is_not_there_is_named_with_its_key(tmp_path: Path, table: str) -> None:
    gone = str(tmp_path / "gone.parquet")
    with pytest.raises(TaskError, match=rf"task\.path: there is nothing at {re.escape(gone)}"):
        ParquetTable(gone, label="kind").dataset("train")
    with pytest.raises(TaskError, match=rf"task\.validation_path: there is nothing at {re.escape(gone)}"):
        ParquetTable(table, label="kind", validation_path=gone).dataset("validation")
    with pytest.raises(TaskError, match=r"task\.path: no filesystem for zzz://a: "):
        ParquetTable("zzz://a", label="kind").dataset("train")


def test_a_table_without_rows_is_empty_data(tmp_path: Path) -> None:
    pq.write_table(people(0), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="is empty"):
        open_source(ParquetTable(str(tmp_path / "rows.parquet"), label="height", kind="regression").dataset("train"))
