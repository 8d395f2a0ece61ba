"""The body of a request for text, within the limits of an endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

from fastapi import Request
from pydantic import AfterValidator, BeforeValidator, Field, create_model

from orchestray.serving.generation.sampling import Sampling, Text
from orchestray.serving.http.body import parse_object, read_body
from orchestray.serving.models.errors import InputError


def _alone(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _named(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


_One = Annotated[list[Text], Field(min_length=1, max_length=1)]
_Prompt = Annotated[Text, BeforeValidator(_alone, json_schema_input_type=Text | _One)]


class TextRequest(Sampling):
    """The body of `POST /generate`."""

    prompt: _Prompt
    model: str | None = None
    """text; of several models, which"""
    version: Annotated[str, BeforeValidator(_named, json_schema_input_type=str | int)] | None = None
    """text or a whole number; of its versions, which: by default by their traffic"""
    stream: bool = False
    """true or false; answer by server-sent events"""


@dataclass(frozen=True)
class TextLimits:
    """The limits of requests for text: see `make_generate_router`."""

    max_body_bytes: int
    most_tokens: int
    most_prompt_bytes: int


Form = TypeVar("Form", bound=TextRequest)


class TextBody(Generic[Form]):
    """The body of a route.

    Args:
        form: its model.
        limits: what a request may ask for; part of the model's schema.
    """

    def __init__(self, form: type[Form], limits: TextLimits) -> None:
        most_bytes, most_tokens = limits.most_prompt_bytes, limits.most_tokens
        of_prompt = f"one text of up to {most_bytes} bytes in UTF-8 (generation.max_prompt_bytes), not empty"

        def check(prompt: str) -> str:
            # Each token takes memory for the life of the request, and time of the loop that all requests share.
            if (num_bytes := len(prompt.encode())) > most_bytes:
                raise InputError("prompt", of_prompt, f"{num_bytes} bytes")
            return prompt

        default = min(form.model_fields["max_tokens"].default, most_tokens)
        of_tokens = f"a whole number from 1 to {most_tokens}; largest number of tokens to generate"
        prompt = Field(json_schema_extra={"maxLength": most_bytes}, description=of_prompt)
        self._limits = limits
        self._form = create_model(
            form.__name__,
            __base__=form,
            prompt=(Annotated[_Prompt, AfterValidator(check), prompt], ...),
            max_tokens=(Annotated[int, Field(ge=1, le=most_tokens, description=of_tokens)], default),
        )

    async def read(self, request: Request) -> Form:
        """Receive and parse the body of a request.

        Raises:
            HttpProblem: it is too large, or not a JSON object.
            InputError: a field is invalid.
        """
        body = await read_body(request.receive, self._limits.max_body_bytes)
        wanted = '{"prompt": "import ", "max_tokens": 32}'
        return self._form.model_validate(parse_object(body, wanted))

    def openapi(self) -> dict[str, Any]:
        """Return `requestBody` of the OpenAPI document, with an example that works as it is."""
        example = {"prompt": "import "[: self._limits.most_prompt_bytes], "temperature": 0.8, "seed": 1}
        example["max_tokens"] = min(32, self._limits.most_tokens)
        schema = {**self._form.model_json_schema(), "example": example}
        return {"required": True, "content": {"application/json": {"schema": schema, "example": example}}}
