"""The page about a search: it holds all that it needs."""

from __future__ import annotations

import json
import re
from typing import Any

from orchestray.search.config.load import load_search_config
from orchestray.search.methods.base import rng_of
from orchestray.search.registry.check import space_of
from orchestray.search.results.report import drawn_network, plotly_script, report_html
from support.search_configs import GOOD


def page(name: str = "a", **more: Any) -> str:
    config = load_search_config({**GOOD, "name": name})
    lines = [
        {"trial": trial, "status": "succeeded", "objective": 0.1 * trial, "config": {"train.optimizer.lr": 0.1 * trial}}
        for trial in range(1, 4)
    ]
    lines[0] |= more
    reports = [{"trial": 1, "step": 10, "metrics": {"accuracy": 0.1}}]
    nodes = [{"trial": 1, "parent": None, "step": 0, "change": ""}]
    result = {"status": "succeeded", "trials": 3, "best": lines[-1], "seconds": 3.0, "steps": 60, "error": None}
    return report_html(config, result, lines, reports, nodes)


def data_of(html: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


def test_the_page_needs_nothing_from_the_network() -> None:
    html = page().replace(plotly_script(), "")
    assert not re.search(r"""(src|href)\s*=\s*["']|@import|url\(""", html)
    assert "http" not in html


def test_the_page_has_the_figures_and_the_best_trial() -> None:
    data = data_of(page())
    assert data["best_trial"] == 3
    assert data["figures"]["best_so_far"]["best"][-1] == max(data["figures"]["best_so_far"]["objectives"])
    assert ["best accuracy", "0.3"] in data["tiles"]


def test_the_best_network_is_drawn() -> None:
    config = load_search_config({**GOOD, "search": {**GOOD["search"], "architecture": {"space": "chain"}}})
    space = space_of(config)
    assert space is not None
    svg = drawn_network(config, space.sample(rng_of(0)))
    assert svg is not None
    assert svg.startswith("<svg")
    assert drawn_network(config, None) is None


def test_texts_of_a_trial_cannot_end_the_script_they_are_in() -> None:
    html = page(error="</script><script>alert(1)</script>", status="failed")
    assert "<script>alert(1)" not in html
    assert data_of(html)["figures"]["table"]["rows"][0][-1] == "</script><script>alert(1)</script>"
