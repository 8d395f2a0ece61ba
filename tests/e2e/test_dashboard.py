"""`orchestray dashboard` as a user sees it: in a real browser, while runs go on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from orchestray.search.results.schema import TrialLine
from support.browser import WAIT_MS, watched
from support.cli import COMMAND, TIMEOUT_S, orchestray, outside
from support.run_directories import LR, WrittenRun, WrittenSearch, write_all

SMALL = 400
"""Width of a small screen in pixels."""


@dataclass(frozen=True)
class Served:
    """A dashboard that runs, over a directory with one of each."""

    url: str
    runs_dir: Path
    run: WrittenRun
    search: WrittenSearch


@contextmanager
def dashboard(runs_dir: Path, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run the command, and yield the URL it prints, and its process."""
    command = [*COMMAND, "dashboard", "--runs-dir", str(runs_dir), "--port", "0", *arguments]
    environment = {**outside(), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://127.0.0.1:" in line, (line, process.stderr)
        yield line.split()[-1], process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    runs_dir = tmp_path_factory.mktemp("runs")
    run, search = write_all(runs_dir)
    assert isinstance(run, WrittenRun)
    assert isinstance(search, WrittenSearch)
    with dashboard(runs_dir) as (url, _):
        yield Served(url, runs_dir, run, search)
    run.close()
    search.close()


@pytest.fixture(scope="module")
def visitor(browser: Any) -> Iterator[Any]:
    """Yield a visitor whose browser keeps what it has loaded once."""
    context = browser.new_context()
    yield context
    context.close()


@contextmanager
def opened(visitor: Any, served: Served, place: str = "", *, width: int = 1280, scheme: str = "light") -> Iterator[Any]:
    """Open a page of the dashboard; at its end it must have been silent, and have sent no request elsewhere."""
    own = (served.url, "data:", "blob:")
    with watched(visitor, own, width=width, height=900, scheme=scheme) as (page, told):
        page.goto(f"{served.url}#/{place}")
        page.wait_for_selector(".connection.is-live")
        yield page
        assert told == []


@pytest.fixture(scope="module")
def search_page(visitor: Any, served: Served) -> Iterator[Any]:
    """Yield the page of a search, which is drawn once for all that is done on it: drawing takes longest."""
    with opened(visitor, served, "search/digits-random") as page:
        page.wait_for_selector("#trials tbody tr")
        yield page


def wait_for(page: Any, expression: str) -> None:
    """Wait until an expression is true in the page.

    It is asked from here: the page's policy lets nobody evaluate a text within it.
    """
    deadline_s = time.monotonic() + WAIT_MS / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < deadline_s, f"never: {expression}"
        page.wait_for_timeout(50)


def assert_fits(page: Any, width: int) -> None:
    """Check that no part of the page is wider than its screen: the body hides what hangs out, which none may need."""
    blocks = "[...document.querySelectorAll('main > *, section')]"
    widest = f"Math.max(...{blocks}.map(element => element.getBoundingClientRect().right))"
    assert page.evaluate(widest) <= width
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_click_leads_from_the_list_to_the_curves_of_a_run_and_both_fit_a_small_screen(
    visitor: Any, served: Served
) -> None:
    with opened(visitor, served, width=SMALL) as page:
        page.wait_for_selector("tbody tr")
        assert_fits(page, SMALL)
        page.click("text=digits-stale-synchronous")
        page.wait_for_selector("#curve-loss .scatterlayer .trace")
        assert page.inner_text("h1") == "digits-stale-synchronous"
        assert page.locator("#curve-accuracy .scatterlayer .trace").count() == 1
        assert page.locator("#workers tbody tr").count() == 3
        assert "checkpoint saved" in page.inner_text("#events")
        assert_fits(page, SMALL)
        page.go_back()
        page.wait_for_selector("text=Runs and searches")


def test_the_list_is_filtered_and_sorted_and_its_numbers_are_short(visitor: Any, served: Served) -> None:
    values, shown = [2.523478e23, -4e18, 123456789, 12345.678, 0.61], ["2.52e+23", "-4.00e+18", "123,456,789"]
    shown += ["12,346", "0.61"]
    with opened(visitor, served) as page:
        page.wait_for_selector(".list tbody tr")
        names = page.locator(".list tbody td:first-child a")
        assert names.count() == 8
        page.fill("input[type=search]", "digits evol")
        assert names.all_inner_texts() == ["digits-evolution"]
        page.fill("input[type=search]", "")
        page.select_option("select[aria-label=Show]", "search")
        assert sorted(names.all_inner_texts()) == ["digits-evolution", "digits-pbt", "digits-random"]
        page.click("th[data-key=name] button")
        assert names.all_inner_texts() == ["digits-evolution", "digits-pbt", "digits-random"]
        page.click("th[data-key=name] button")
        assert names.all_inner_texts() == ["digits-random", "digits-pbt", "digits-evolution"]
        assert page.get_attribute("th[data-key=name]", "aria-sort") == "descending"
        place = "performance.getEntriesByType('resource').find((each) => each.name.endsWith('/dom.js')).name"
        assert page.evaluate(f"async (values) => values.map((await import({place})).number)", values) == shown


def test_predictions_are_shown_beside_what_the_steps_took(visitor: Any, served: Served) -> None:
    with opened(visitor, served, width=SMALL) as page:
        page.click("text=Predictions")
        page.wait_for_selector(".list tbody tr")
        page.wait_for_selector(".chart .scatterlayer .trace")
        assert "-5.0 %" in page.inner_text(".list tbody tr")
        assert "median error 5.0 %" in page.inner_text(".summary")
        assert_fits(page, SMALL)


def test_new_lines_appear_while_the_page_is_open(visitor: Any, served: Served) -> None:
    with opened(visitor, served, "run/digits-live") as page:
        page.wait_for_selector("#curve-loss .scatterlayer .trace")
        step, points = served.run.step + 7, "document.querySelector('#curve-loss').data[0].x"
        served.run.steps(7)
        served.run.event("worker_lost", role="worker", rank=1)
        wait_for(page, f"document.querySelector('.tile b').textContent.startsWith('{step} ')")
        wait_for(page, f"document.querySelector('#curve-loss').data.some(trace => trace.x.at(-1) === {step})")
        page.wait_for_selector("#events >> text=worker lost")
        assert page.evaluate(f"{points}.every((x, i) => i === 0 || x > {points}[i - 1])")


def test_a_trial_that_ends_appears_in_the_table_and_becomes_the_best(search_page: Any, served: Served) -> None:
    page = search_page
    page.wait_for_selector("#best-so-far .scatterlayer .trace")
    trial = len(served.search.lines)
    config = {**served.search.lines[0]["config"], LR: 0.123456}
    served.search.append("reports", trial=trial, step=9, time_s=1.0, metrics={"accuracy": 0.01})
    served.search.ended(TrialLine(trial, "succeeded", 0.9999, config, steps=200, seconds=1.0))
    page.wait_for_selector(f"#trials tbody tr.best[data-key='{trial}']")
    wait_for(page, "document.querySelector('#best').textContent.includes('0.123456')")
    wait_for(page, "document.querySelector('#best-so-far').data[1].y.at(-1) === 0.9999")
    wait_for(page, f"document.querySelector('#curves').data.at(-1).name === 'trial {trial}'")
    page.fill("#trials input[type=search]", "failed")
    assert page.locator("#trials tbody tr").count() == 3
    page.wait_for_selector("#importance .barlayer")
    page.fill("#trials input[type=search]", "")


def test_the_trials_are_sorted_by_a_click_and_the_other_way_by_another(search_page: Any) -> None:
    page = search_page
    page.wait_for_selector("text=start this page with --ray-dashboard URL")  # it knows no addresses to link
    assert "tensorboard --logdir" in page.inner_text("main")
    assert page.locator("a:text-is('TensorBoard')").count() == 0
    keys, head = page.locator("#trials tbody tr"), page.locator("#trials th[data-key=trial]")
    num = keys.count()
    assert num > 3
    shown = []
    for _ in range(2):
        head.locator("button").click()
        order = [int(keys.nth(row).get_attribute("data-key")) for row in range(num)]
        shown.append((head.get_attribute("aria-sort"), order))
    numbers = sorted(shown[0][1])
    assert sorted(shown) == [("ascending", numbers), ("descending", numbers[::-1])]


def test_dragging_along_an_axis_picks_trials(search_page: Any) -> None:
    page = search_page
    canvas = page.locator(".parallel canvas")
    page.evaluate("window.scrollTo(0, 0)")  # from below it would come up behind the page's head
    canvas.scroll_into_view_if_needed()
    before = page.locator("#trials tbody tr").count()
    box = canvas.bounding_box()
    x = box["x"] + box["width"] - 44  # the objective: its upper half
    page.mouse.move(x, box["y"] + 48)
    page.mouse.down()
    page.mouse.move(x, box["y"] + 120, steps=4)
    page.mouse.up()
    wait_for(page, f"document.querySelectorAll('#trials tbody tr').length < {before}")
    assert page.locator("#trials tbody tr").count() > 0
    page.click("text=Forget the picked ranges")
    assert page.locator("#trials tbody tr").count() == before


def test_what_ray_and_tensorboard_show_is_linked_where_their_addresses_are_known(visitor: Any, served: Served) -> None:
    links = {"Ray dashboard": "http://127.0.0.1:8265/", "TensorBoard": "http://127.0.0.1:6006/"}
    arguments = ["--ray-dashboard", links["Ray dashboard"], "--tensorboard", links["TensorBoard"]]
    with (
        dashboard(served.runs_dir, *arguments) as (url, _),
        opened(visitor, replace(served, url=url), "search/digits-random") as page,
    ):
        for place in ("search/digits-random", "run/digits-stale-synchronous"):
            page.goto(f"{url}#/{place}")
            page.wait_for_selector(f"h1:text-is('{place.split('/')[1]}')")
            page.wait_for_selector("a:text-is('TensorBoard')")
            shown = {text: page.locator(f"a:text-is('{text}')").get_attribute("href") for text in links}
            assert shown == links


def test_an_architecture_is_drawn_with_those_it_descends_from_on_a_small_screen(visitor: Any, served: Served) -> None:
    with opened(visitor, served, "search/digits-evolution", width=SMALL) as page:
        page.wait_for_selector(".family .member.is-last svg")
        page.wait_for_selector("#pareto .scatterlayer .trace")
        assert_fits(page, SMALL)
        page.locator("#trials tbody button.link").first.focus()
        page.keyboard.press("Enter")
        page.wait_for_selector("dialog[open] .network svg")
        assert page.inner_text("#trial-title") == "Trial 59"
        page.keyboard.press("Escape")
        page.wait_for_selector("dialog:not([open])", state="attached")


def test_the_schedule_of_a_population_shows_its_copies_on_a_small_screen(visitor: Any, served: Served) -> None:
    with opened(visitor, served, "search/digits-pbt", width=SMALL) as page:
        page.wait_for_selector("#schedule-1 .scatterlayer .trace")
        assert page.evaluate("document.querySelector('#schedule-0').data.at(-1).text.length") == 22
        page.wait_for_selector("#lineage .scatterlayer .trace")
        assert_fits(page, SMALL)


def test_colours_follow_the_system_until_the_user_chooses(browser: Any, served: Served) -> None:
    dark, light = "rgb(18, 21, 26)", "rgb(246, 247, 249)"
    background = "getComputedStyle(document.body).backgroundColor"
    with opened(browser, served, scheme="light") as page:
        assert page.evaluate(background) == light
        page.emulate_media(color_scheme="dark")
        assert page.evaluate(background) == dark
        page.click("#theme")
        assert page.inner_text("#theme") == "Light"
        assert page.evaluate(background) == light
        page.reload()
        page.wait_for_selector(".connection.is-live")
        assert page.evaluate(background) == light


def test_damaged_files_and_names_that_are_none_are_told_of(visitor: Any, served: Served) -> None:
    with opened(visitor, served, "run/damaged") as page:
        page.wait_for_selector("text=result.json is half-written")
        page.wait_for_selector("#curve-loss .scatterlayer .trace")


def test_an_empty_directory_says_what_to_do(visitor: Any, tmp_path: Path) -> None:
    with dashboard(tmp_path / "none") as (url, _):
        served: Any = type("Empty", (), {"url": url})
        with opened(visitor, served) as page:
            page.wait_for_selector("text=orchestray train configs/train/digits.yaml")
            run = WrittenRun(tmp_path / "none", "first")
            page.wait_for_selector("td >> text=first")
            run.close()


def test_ctrl_c_ends_it_at_once_though_a_page_is_open(tmp_path: Path) -> None:
    with dashboard(tmp_path) as (url, process):
        page = socket.create_connection(("127.0.0.1", int(url.split(":")[2].rstrip("/"))))
        page.sendall(b"GET /api/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in page.recv(4096)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 130
        assert "Traceback" not in stderr
        page.close()


def test_a_port_that_is_taken_is_said_in_a_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ended = orchestray("dashboard", "--runs-dir", tmp_path, "--port", port)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"could not listen on 127.0.0.1:{port}: address already in use; choose another port")
    assert "Traceback" not in ended.stderr


def test_what_is_heavy_is_not_loaded() -> None:
    loaded = "[name for name in ('torch', 'ray', 'sklearn') if name in sys.modules]"
    code = f"import sys, orchestray.dashboard.serve; print({loaded})"
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert found.stdout.strip() == "[]"
