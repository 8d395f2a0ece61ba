"""`/v1/completions` and `/v1/models`, in the form of OpenAI's API."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from support.generation import small_model
from support.http_endpoint import PAIR, ROW_SUMS, endpoint, pair, row_sums

MODEL = small_model(context=32, depth=1)
BODY = {"model": "sums", "prompt": "def ", "max_tokens": 8, "temperature": 0.8, "top_p": 0.9, "seed": 3}
PROMPT = "one text of up to 16384 bytes in UTF-8 (generation.max_prompt_bytes), not empty"


def ask(*bodies: Any, path: str = "/v1/completions") -> list[httpx.Response]:
    async def asking() -> list[httpx.Response]:
        async with endpoint(text=MODEL) as asked:
            return [await asked.client.post(path, json=body) for body in bodies]

    return asyncio.run(asking())


def test_an_answer_is_that_of_generate_with_the_counts_of_tokens() -> None:
    (plain,) = ask(BODY, path="/generate")
    (answer,) = ask(BODY)
    found = answer.json()
    assert answer.status_code == 200
    assert found["id"] == f"cmpl-{answer.headers['x-request-id']}"
    assert (found["object"], found["model"]) == ("text_completion", "sums")
    choice = {"index": 0, "text": plain.json()["text"], "logprobs": None, "finish_reason": "length"}
    assert found["choices"] == [choice]
    assert found["usage"] == {"prompt_tokens": 4, "completion_tokens": 8, "total_tokens": 12}


def test_a_stream_is_the_whole_answer_and_ends_with_the_usage_if_asked_for() -> None:
    whole, streamed, plain = ask(
        BODY, {**BODY, "stream": True, "stream_options": {"include_usage": True}}, {**BODY, "stream": True}
    )
    lines = streamed.text.split("\n\n")[:-1]
    assert lines.pop() == "data: [DONE]"
    *chunks, usage = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole.json()["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 8 + ["length"]
    assert [chunk["usage"] for chunk in chunks] == [None] * 9
    assert (usage["choices"], usage["usage"]) == ([], whole.json()["usage"])
    assert "usage" not in plain.text


def test_a_stop_text_ends_the_answer() -> None:
    text = ask(BODY)[0].json()["choices"][0]["text"]
    for stop in (text[3:5], ["never", text[3:5]]):
        choice = ask({**BODY, "stop": stop})[0].json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text[: text.find(text[3:5])], "stop")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n": 2}, "n: wanted 1: a request has one answer, got 2."),
        ({"echo": True}, "echo: wanted false: an answer does not repeat its prompt, got true."),
        ({"logprobs": 3}, "logprobs: wanted null: probabilities of tokens are not answered, got 3."),
        ({"presence_penalty": 0.5}, "presence_penalty: wanted 0: repetitions are not punished, got 0.5."),
        ({"logit_bias": {"5": 1}}, "logit_bias: wanted null: tokens are not weighted, got an object."),
        ({"suffix": "."}, "suffix: wanted null: text is not put in between, got text."),
        ({"prompt": ["a", "b"]}, f"prompt: wanted {PROMPT}, got a list of 2."),
        ({"top_p": 0}, "top_p: wanted a number above 0 and up to 1, got 0."),
        ({"temperature": "1"}, "temperature: wanted a finite number >= 0, got text."),
        ({"max_tokens": 9999}, "max_tokens: wanted a whole number from 1 to 4096, got 9999."),
    ],
)
def test_what_is_not_supported_is_refused_in_the_form_of_openai(wrong: Any, message: str) -> None:
    (answer,) = ask({**BODY, **wrong})
    assert answer.status_code == 400
    (name,) = wrong
    error = {"message": message, "type": "invalid_request_error", "param": name, "code": None}
    assert answer.json() == {"error": error, "request_id": answer.headers["x-request-id"]}


def test_fields_that_change_nothing_are_taken() -> None:
    neutral = {"n": 1, "best_of": 1, "echo": False, "logprobs": None, "presence_penalty": 0, "frequency_penalty": 0.0}
    whole, *same = ask(
        BODY,
        {**BODY, **neutral, "user": "me", "suffix": None, "prompt": [BODY["prompt"]]},
        {**BODY, "logit_bias": {}, "suffix": ""},
    )
    assert [one.json()["choices"] for one in same] == 2 * [whole.json()["choices"]]


def test_a_model_of_numbers_is_ready_as_clients_of_kserve_ask() -> None:
    async def asking() -> list[httpx.Response]:
        async with endpoint((ROW_SUMS, row_sums), (PAIR, pair), text=MODEL) as asked:
            found = [await asked.client.get("/v1/models/pair")]
            asked.registry.ready = False
            return [*found, await asked.client.get("/v1/models/pair")]

    ready, ending = asyncio.run(asking())
    assert (ready.status_code, ready.json()) == (200, {"name": "pair", "ready": True})
    assert ending.status_code == 503


def test_the_models_are_those_that_generate_text() -> None:
    async def asking() -> list[httpx.Response]:
        async with endpoint(text=MODEL) as asked:
            paths = ("/v1/models", "/v1/models/sums", "/v1/models/other", "/v1/nothing")
            return [await asked.client.get(path) for path in paths]

    listed, one, other, nothing = asyncio.run(asking())
    assert listed.json() == {"object": "list", "data": [one.json()]}
    assert (one.json()["id"], one.json()["object"]) == ("sums", "model")
    assert [answer.status_code for answer in (other, nothing)] == [404, 404]
    assert other.json()["error"]["type"] == nothing.json()["error"]["type"] == "not_found_error"
