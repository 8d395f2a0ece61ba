"""The site of the documentation as a reader has it: built, opened as files in a browser, and searched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.browser import watched

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = {
    "resume after spot kill": "how-to/resume-and-spot-machines.html",
    "stop one bad replica": "how-to/canary-and-rollback.html#stop-one-bad-replica",
    "train with attention masks": "how-to/several-inputs.html#train-with-an-attention-mask",
    "compare two schemes before renting": "how-to/choose-a-scheme.html#compare-two-schemes-before-renting-a-cluster",
    "reproduce a search": "how-to/resume-and-reproduce-a-search.html#reproduce-a-search",
    "load test": "how-to/load-testing.html",
    "authentication": "how-to/authentication-and-tls.html",
    "autoscaling": "how-to/autoscaling.html",
}
"""Maps what a reader types to the page, or its part, that answers."""
FOUND = """(question) => {
    const links = (root) => [...root.querySelectorAll("*")].flatMap((each) =>
        each.shadowRoot ? links(each.shadowRoot) : each.matches("a[href*='?h=']") ? [each.href] : []
    );
    const found = links(document).filter((link) => new URL(link).searchParams.get("h") === question);
    return found.map((link) => link.replace(/[?][^#]*/, ""));
}"""
"""Script that returns the addresses of what the search for a question has found, the best first."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("build")
    path = os.pathsep.join([str(ROOT / "docs"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "builder", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def test_a_question_typed_into_the_search_finds_its_answer_first_and_nothing_is_fetched(
    site: Path, browser: Any
) -> None:
    home = (site / "index.html").as_uri()
    with watched(browser, ("file:", "data:", "blob:"), width=1300, height=900, scheme="light") as (page, told):
        page.goto(home)  # once: every page that is opened makes the index of its search
        page.keyboard.press("Control+k")
        for question, answer in QUESTIONS.items():
            page.keyboard.press("Control+a")
            page.keyboard.insert_text(question)
            # What the last question has found is taken away a moment later.
            is_first = f"([question, answer]) => ({FOUND})(question)[0]?.startsWith(answer)"
            page.wait_for_function(is_first, arg=[question, f"{site.as_uri()}/{answer}"])
        assert told == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_with_pictures_is_wider_than_a_small_screen_and_each_picture_is_there(
    site: Path, browser: Any, scheme: str
) -> None:
    with watched(browser, ("file:", "data:", "blob:"), width=400, height=900, scheme=scheme) as (page, told):
        for name in ("index", "gallery", "benchmarks/exchanges", "benchmarks/serving"):
            page.goto((site / f"{name}.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= 400, name
            assert page.evaluate("[...document.images].filter((each) => !each.naturalWidth).length") == 0, name
        assert told == []
