"""Full synchronisation beside Approximate Synchronous Parallel, over a slow link and a fast one."""

from __future__ import annotations

from dataclasses import replace
from math import isinf
from typing import Any

from orchestray.platform.sim.network import Link
from orchestray.trainers.survey.data_centres.centre import FULL_SYNCHRONISATION, Rules, most_ahead
from orchestray.trainers.survey.data_centres.training import Setting, Training

SIGNIFICANCE = 0.3
LINKS = {
    "slow": Link(latency_s=0.02, bandwidth_bytes_per_s=20_000),
    "fast": Link(latency_s=0.0005, bandwidth_bytes_per_s=1e9),
}
"""Links between any two data centres. What a clock of 10 ms changes takes the slow one about 70 ms."""
LARGE_RATE = 1.0
"""Learning rate with which the training does not bear old parameters."""


def gaia(setting: Setting) -> Rules:
    """Return the rules of Approximate Synchronous Parallel, with the bound that fits the link."""
    return Rules(SIGNIFICANCE, most_ahead=most_ahead(setting.link, min(setting.step_s)))


def compare(seed: int = 0) -> list[list[Any]]:
    """Return a row for each link, learning rate and set of rules; with the filter alone nobody waits.

    A row begins with these, and goes on with the seconds to the target ("never": not in `Setting.most_clocks` clocks),
    the clocks, and the kB between the data centres. The most clocks ahead follow, with their bound. The last two are
    the seconds that workers waited at barriers and for clocks.
    """
    rows: list[list[Any]] = []
    slow, fast = Setting(LINKS["slow"]), Setting(LINKS["fast"])
    for name, setting in ("slow", slow), ("slow", replace(slow, lr=LARGE_RATE)), ("fast", fast):
        for words, rules in {
            "synchronous": FULL_SYNCHRONISATION,
            "ASP": gaia(setting),
            "filter alone": Rules(SIGNIFICANCE, announces=False),
        }.items():
            found = Training(rules, setting, seed).run()
            row: list[Any] = [name, setting.lr, words, "never" if found.seconds is None else f"{found.seconds:.2f}"]
            bound = "" if isinf(rules.most_ahead) else f" of {rules.most_ahead}"
            row += [found.clocks, found.num_bytes // 1000, f"{found.most_ahead}{bound}"]
            rows.append([*row, found.waited_s["barrier"], found.waited_s["clock"]])
    return rows
