"""Loggers that several searches of a process silence at once."""

from __future__ import annotations

import logging

from orchestray.search.engine.silence_loggers import Quiet


def test_levels_come_back_when_the_last_of_several_has_left_whoever_came_first() -> None:
    logger = logging.getLogger("orchestray_test.quiet")
    logger.setLevel(logging.WARNING)
    quiet = Quiet(logger.name)
    first, second = quiet.__enter__(), quiet.__enter__()
    first.__exit__(None, None, None)
    assert logger.level == logging.CRITICAL, "the second is still within"
    second.__exit__(None, None, None)
    assert logger.level == logging.WARNING
    with quiet:
        assert logger.level == logging.CRITICAL
    assert logger.level == logging.WARNING
