"""Settings go to other processes as JSON."""

from __future__ import annotations

import json

from orchestray.serving.http import HttpSettings, Tokens
from orchestray.serving.http.auth import Token
from orchestray.serving.http.settings import JSON


def test_settings_come_back_from_json_as_they_were() -> None:
    tokens = Tokens((Token("a" * 64, "us", 2.5), Token("b" * 64, "them")))
    settings = HttpSettings(tokens=tokens, timeout_s=0.5, cors_origins=("https://a.example",), root_path="/a")
    for each in (HttpSettings(), settings):
        assert JSON.validate_python(json.loads(json.dumps(JSON.dump_python(each, mode="json")))) == each
