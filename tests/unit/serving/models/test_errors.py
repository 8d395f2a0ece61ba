"""Errors of models travel between processes, with what the log needs of their causes."""

from __future__ import annotations

import pickle
import traceback

from orchestray.serving.models.errors import ModelError, run_isolated


def test_the_error_of_a_model_takes_the_traceback_of_its_cause_to_another_process() -> None:
    class Own(Exception):  # noqa: N818 - one that the other process cannot import
        pass

    def run(_: object) -> list[Exception]:
        raise Own("no such word")

    (failed,) = run_isolated("own", run, [{}])  # type: ignore[arg-type]
    received = pickle.loads(pickle.dumps(failed))  # noqa: S301
    assert (type(received), str(received)) == (ModelError, "The model raised Own on this request.")
    told = "".join(traceback.format_exception(pickle.loads(pickle.dumps(received))))  # noqa: S301
    assert "Own: no such word" in told
    assert 'raise Own("no such word")' in told
    assert pickle.loads(pickle.dumps(ModelError("alone"))).__cause__ is None  # noqa: S301
