"""Access to the dashboard: who may ask, and for what."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestray.dashboard.guard import is_own_host
from orchestray.dashboard.pages import make_app
from support.asgi import Answer, request
from support.run_directories import WrittenRun, damaged_run, random_search

ANY = "0.0.0.0"  # noqa: S104 - nothing is bound


class Client:
    def __init__(self, app: Any) -> None:
        self.app = app

    def get(self, path: str, **params: object) -> Answer:
        return request(self.app, path, params)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    (tmp_path / "secret.txt").write_text("hidden words")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "config.yaml").write_text("name: hidden words")
    runs = tmp_path / "runs"
    run, search = WrittenRun(runs, "a run?&#"), random_search(runs, trials=9)
    run.steps(30)
    damaged_run(runs)
    app, _ = make_app(runs)
    yield Client(app)
    run.close()
    search.close()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
@pytest.mark.parametrize("path", ["/", "/api/overview", "/nothing"])
def test_nothing_but_reading_is_a_method(client: Client, method: str, path: str) -> None:
    answer = request(client.app, path, method=method)
    assert answer.status == 405
    assert answer.headers["allow"] == "GET"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8266", "127.0.0.1.evil.example", "", "192.0.2.7:8266"])
def test_a_name_that_somebody_else_points_here_is_refused(client: Client, host: str) -> None:
    assert request(client.app, "/api/overview", host=host).status == 421


@pytest.mark.parametrize("host", ["127.0.0.1:8266", "localhost:8266", "LOCALHOST", "[::1]:8266"])
def test_this_machine_may_ask_by_any_of_its_own_names(client: Client, host: str) -> None:
    assert request(client.app, "/api/overview", host=host).status == 200


def test_listening_for_all_lets_addresses_in_but_no_foreign_names() -> None:
    assert is_own_host("192.0.2.7:8266", ANY)
    assert is_own_host("[2001:db8::7]:8266", "::")
    assert not is_own_host("evil.example:8266", ANY)
    assert is_own_host("box.example:8266", "box.example")


@pytest.mark.parametrize(
    "name",
    ["../outside", "..", ".", "/", "../secret.txt", "a run?&#/../../outside", "outside", "x\0y", "", "damaged/best"],
)
def test_no_name_leads_out_of_the_directory(client: Client, name: str) -> None:
    for path in ("/api/run", "/api/search", "/report"):
        answer = client.get(path, name=name)
        assert answer.status == 404
        assert "hidden" not in answer.text
        assert "error" in answer.json()


@pytest.mark.parametrize(
    "path", ["/assets/../pages.py", "/assets/..%2fpages.py", "/assets/%2e%2e/guard.py", "/assets/x.js"]
)
def test_no_file_but_those_of_the_page_is_served(client: Client, path: str) -> None:
    assert client.get(path).status == 404


def test_every_answer_forbids_what_comes_from_elsewhere(client: Client) -> None:
    for path in ("/", "/assets/main.js", "/api/overview", "/nothing"):
        policy = client.get(path).headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy


def test_names_with_odd_characters_are_found(client: Client) -> None:
    answer = client.get("/api/run", name="a run?&#")
    assert answer.status == 200
    assert answer.json()["head"]["step"] == 30


def test_damaged_files_are_no_errors_of_the_server(client: Client) -> None:
    assert client.get("/api/overview").status == 200
    answer = client.get("/api/run", name="damaged")
    assert answer.status == 200
    assert answer.json()["head"]["problems"]


def test_a_trial_that_is_none_and_a_number_that_is_none_are_told_so(client: Client) -> None:
    assert client.get("/api/search/trial", name="digits-random", trial=999).status == 404
    assert client.get("/api/search/trial", name="digits-random", trial="x").status == 422
