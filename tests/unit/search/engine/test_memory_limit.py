"""Memory that a trial may hold, in a process that has held more before."""

from __future__ import annotations

import textwrap
from pathlib import Path

from support.forked import Forked

AFTER_ANOTHER = """
    import sys
    from dataclasses import replace

    from orchestray.trainers.config.load import load_train_config
    from orchestray.platform.actors.member import keep_freed_memory
    from orchestray.search.engine.trial_worker import TrialHost
    from orchestray.search.engine.memory_limit import status_bytes
    from orchestray.search.engine.messages import TrialLimits, TrialTask
    from support.search_loop import ACCURACY, base

    keep_freed_memory()

    def order(trial, behaviour):
        task = {"type": "support.odd_task:OddTask", "behaviour": behaviour}
        config = load_train_config(base() | {"task": task, "train": base()["train"] | {"steps": 6}})
        return TrialTask(trial, 6, config=config, begins=True)

    host = TrialHost(TrialLimits(ACCURACY, sys.argv[1]))
    first = host.work(order(0, "fine"))
    limit_mb = status_bytes("VmRSS") / 2**20 + 150
    host._rules = replace(host._rules, memory_mb=limit_mb)
    hoarding, after = host.work(order(1, "hoarding")), host.work(order(2, "fine"))
    host.close()
    assert first.error is None
    assert "ran out of memory" in hoarding.error, hoarding
    assert after.error is None, after.error
    assert after.metrics == first.metrics
"""


def test_a_trial_is_not_charged_for_what_the_one_before_held_when_it_ran_out_of_memory(tmp_path: Path) -> None:
    with Forked(textwrap.dedent(AFTER_ANOTHER), str(tmp_path)) as process:
        assert process.wait() == 0, process.printed()
