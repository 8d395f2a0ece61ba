"""Endpoints whose requests and answers have their own forms: classes of any kind, tasks that decode and encode."""

from __future__ import annotations

import base64
import http.client
import io
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from support.live_endpoint import serving
from support.patience import PATIENCE_S
from support.served import written_run

OWN = """
import numpy as np

def words(batch):
    return [{"words": row["text"].split()} if isinstance(row, dict) else
            row.split() if isinstance(row, str) else [*row] for row in batch]

class Ragged:
    def example_inputs(self): return 0
    def predict(self, batch): return [np.ones(each) if each >= 0 else None for each in batch]
"""
TASK = """
import torch
from torch import nn

class Task:
    example_request = "one two"
    def build_model(self):
        return nn.Identity()
    def example_inputs(self): return torch.ones(2)
    def decode(self, request):
        if isinstance(request, bytes):
            request = request.decode()
        if not isinstance(request, str):
            raise ValueError("wanted a text")
        return torch.tensor([len(request), len(request.split())], dtype=torch.float32)
    def encode(self, outputs):
        return {"letters": int(outputs[0]), "words": int(outputs[1])}
    def dataset(self, split): raise AssertionError("an endpoint asks for no data")
    def to_batch(self, columns): raise AssertionError("an endpoint asks for no data")
    def loss(self, outputs, batch): raise AssertionError("an endpoint asks for no loss")
    def metrics(self, outputs, batch): raise AssertionError("an endpoint asks for no metrics")
"""


def post(port: int, path: str, body: Any, kind: str = "application/json", **headers: str) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("POST" if body is not None else "GET", path, data, {"content-type": kind, **headers})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def config(run: str, **more: Any) -> dict[str, Any]:
    return {"name": "endpoint", "http": {"port": 0}, "models": [{"name": "own", "run": run, **more}]}


def test_a_function_answers_texts_and_rows_by_every_protocol(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with serving(tmp_path, config(f"{tmp_path / 'own.py'}:words")) as port:
        assert post(port, "/predict", {"inputs": "a b"}) == (200, {"outputs": ["a", "b"]})
        assert post(port, "/predict", {"inputs": None})[0] == 500
        split = {"dataframe_split": {"columns": ["text"], "data": [["a b"], ["c"]]}}
        answered = {"predictions": [{"words": ["a", "b"]}, {"words": ["c"]}]}
        assert post(port, "/invocations", split) == (200, answered)
        assert post(port, "/invocations", b'id,text\r\n1,a b\r\n,"c"\r\n', "text/csv") == (200, answered)
        texts = {"name": "inputs", "datatype": "BYTES", "shape": [2, 1]}
        status, told = post(port, "/v2/models/own/infer", {"inputs": [{**texts, "data": ["a b", "c"]}]})
        assert status == 200
        assert told["outputs"] == [
            {"name": "outputs", "datatype": "BYTES", "shape": [2, 1], "data": ['["a","b"]', '["c"]']}
        ]
        texts["parameters"] = {"content_type": "base64"}
        for data, wanted in ((["YSBi", "/w=="], (200, ["[97,32,98]", "[255]"])), (["YSBi", "a b"], (422, None))):
            status, told_bytes = post(port, "/v2/models/own/infer", {"inputs": [{**texts, "data": data}]})
            assert (status, told_bytes.get("outputs", [{"data": None}])[0]["data"]) == wanted
        blob = b"".join(struct.pack("<I", len(text)) + text for text in (b"a b", b"c"))
        head = json.dumps({"inputs": [{**texts, "parameters": {"binary_data_size": len(blob)}}]}).encode()
        length = {"Inference-Header-Content-Length": str(len(head))}
        assert post(port, "/v2/models/own/infer", head + blob, "application/octet-stream", **length)[1] == told
        cut = {**texts, "parameters": {"binary_data_size": len(blob) - 1}}
        head = json.dumps({"inputs": [cut]}).encode()
        length = {"Inference-Header-Content-Length": str(len(head))}
        status, error = post(port, "/v2/models/own/infer", head + blob[:-1], "application/octet-stream", **length)
        assert (status, "each behind its length" in error["error"]) == (422, True)
        assert post(port, "/v2/models/own", None)[1]["outputs"][0]["shape"] == [-1, 1]
        schema = post(port, "/openapi.json", None)[1]["components"]["schemas"]
        assert schema["own.input"] == {"description": "any JSON value"}


def test_answers_of_different_forms_are_one_tensor_of_texts(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    asked = {"name": "inputs", "datatype": "INT64"}
    with serving(tmp_path, config(f"{tmp_path / 'own.py'}:Ragged")) as port:
        for data, datatype, answers in (
            ([2, 2], "FP64", [1.0] * 4),
            ([1, 2], "BYTES", ["[1.0]", "[1.0,1.0]"]),
            ([1, -1], "BYTES", ["[1.0]", "null"]),
        ):
            status, told = post(port, "/v2/models/own/infer", {"inputs": [{**asked, "shape": [2], "data": data}]})
            assert (status, told["outputs"][0]["datatype"], told["outputs"][0]["data"]) == (200, datatype, answers)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    (folder / "task.py").write_text(TASK)
    return written_run(folder / "runs", task={"type": f"{folder / 'task.py'}:Task"})


def test_a_task_decodes_json_and_bytes_and_encodes_the_answer(run: Path) -> None:
    with serving(run.parent, config(str(run))) as port:
        answer = {"letters": 7, "words": 2}
        assert post(port, "/predict", {"inputs": "one two"}) == (200, {"outputs": answer})
        assert post(port, "/predict", b"one two", "text/plain; charset=utf-8") == (200, {"outputs": answer})
        assert post(port, "/invocations", {"inputs": ["one two", "x"]}) == (
            200,
            {"predictions": [answer, {"letters": 1, "words": 1}]},
        )
        status, told = post(port, "/predict", {"inputs": 1})
        assert (status, told["error"]) == (422, "inputs: wanted a text")
        status, told = post(port, "/invocations", {"instances": ["a", 1]})
        assert (status, told["error"]) == (422, "instances[1]: wanted a text")
        assert post(port, "/predict", b"\xff", "application/octet-stream")[0] == 422
        tensor = {"name": "inputs", "datatype": "FP32", "shape": [1, 2], "data": [3, 4]}
        assert post(port, "/v2/models/own/infer", {"inputs": [tensor]})[1]["outputs"][0]["data"] == [3.0, 4.0]
        schema = post(port, "/openapi.json", None)[1]["components"]["schemas"]
        assert schema["own.input"]["example"] == "one two"
        assert post(port, "/models", None)[1][0]["example"] == "one two"


def test_the_built_in_task_of_images_takes_images_and_names_classes(tmp_path: Path) -> None:
    from PIL import Image

    task = {"type": "images", "path": str(tmp_path), "size": 16, "classes": ["cat", "dog"]}
    file = io.BytesIO()
    Image.new("RGB", (30, 20), (200, 10, 10)).save(file, "PNG")
    image = file.getvalue()
    with serving(tmp_path, config(str(written_run(tmp_path / "runs", task=task)))) as port:
        status, told = post(port, "/predict", image, "image/png")
        assert status == 200
        assert told["outputs"]["class"] in {"cat", "dog"}
        assert sum(told["outputs"]["probabilities"].values()) == pytest.approx(1.0)
        text = base64.b64encode(image).decode()
        for form in (text, base64.encodebytes(image).decode(), f"data:image/png;base64,{text}"):
            assert post(port, "/predict", {"inputs": form}) == (200, told)
        status, error = post(port, "/predict", image, "multipart/form-data; boundary=a")
        assert (status, "as curl --data-binary sends it, got a form" in error["error"]) == (422, True)
        for wrong in ("no base64!", base64.b64encode(b"no image").decode()):
            status, error = post(port, "/predict", {"inputs": wrong})
            assert (status, "wanted an image" in error["error"]) == (422, True)
        example = post(port, "/models", None)[1][0]["example"]
        assert post(port, "/predict", {"inputs": example})[0] == 200
