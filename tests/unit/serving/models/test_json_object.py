"""JSON objects: what their fields take, and errors that name the field, what was wanted and what came."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import pytest
from fastapi import APIRouter
from pydantic import BaseModel, Field

from orchestray.serving.models.errors import InputError
from orchestray.serving.models.json_object import JsonObject
from support.http_endpoint import endpoint


class Order(JsonObject):
    count: Annotated[int, Field(ge=1)]
    """a whole number >= 1; how many"""
    price: float = 2.5
    marks: list[int] = Field(default=[])
    note: str | None = None


class Item(BaseModel):
    size: int


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({}, "count: wanted a whole number >= 1, got nothing."),
        ({"count": 0}, "count: wanted a whole number >= 1, got 0."),
        ({"count": True}, "count: wanted a whole number >= 1, got true."),
        ({"count": "1"}, "count: wanted a whole number >= 1, got text."),
        ({"count": 1.5}, "count: wanted a whole number >= 1, got 1.5."),
        ({"count": 1, "marks": [1, "2"]}, "marks[1]: wanted a valid integer, got text."),
        ({"coumt": 1}, "coumt: wanted one of count, price, marks, note, got a name that is none of them."),
        ([], "the body: wanted a valid dictionary or instance of Order, got a list of 0."),
    ],
)
def test_an_error_names_the_field_what_was_wanted_and_what_came(given: Any, error: str) -> None:
    with pytest.raises(InputError) as refused:
        Order.model_validate(given)
    assert str(refused.value) == error


def test_null_stands_for_the_default_and_a_whole_number_may_be_written_with_a_point() -> None:
    order = Order.model_validate({"count": 2.0, "price": None, "note": None})
    assert (order.count, type(order.count), order.price) == (2, int, 2.5)
    assert order == Order(count=2)


def test_a_route_of_a_router_refuses_in_the_same_form_what_its_own_model_does_not_take() -> None:
    router = APIRouter()

    @router.post("/items")
    def add(items: list[Item], page: int = 0) -> int:
        return len(items) + page

    async def ask(path: str, body: Any) -> tuple[int, Any]:
        async with endpoint(routers=[router]) as asked:
            answer = await asked.client.post(path, json=body)
            return answer.status_code, answer.json() if answer.is_success else answer.json()["error"]

    wanted = "a valid integer, unable to parse string as an integer, got text."
    assert asyncio.run(ask("/items", [{"size": 1}, {"size": "x"}])) == (422, f"1.size: wanted {wanted}")
    assert asyncio.run(ask("/items?page=x", [])) == (422, f"page: wanted {wanted}")
    assert asyncio.run(ask("/items?page=1", [{"size": 3}])) == (200, 2)
