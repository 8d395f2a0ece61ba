"""Choice of the version that answers: exact shares, copies for shadows, changes between two requests."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from orchestray.serving.batching import Batcher, Greedy, RunTimeoutError
from orchestray.serving.models import Signature, TensorSpec, UnknownModelError
from orchestray.serving.replicas.in_process import in_process
from orchestray.serving.routing.endpoint import Endpoint, ModelVersion, Share
from orchestray.serving.routing.registry import Registry
from support.patience import PATIENCE_S
from support.served import served_linear

SPEC = TensorSpec("inputs", "float32", ())


class Recorder:
    """A model that keeps what it was asked."""

    num_in_flight = 1

    def __init__(self, version: str, *, fails: bool = False) -> None:
        self.signature = Signature("m", version, (SPEC,), (SPEC,), 0.0)
        self.asked: list[float] = []
        self.types: set[str] = set()
        """Types of its inputs."""
        self._fails = fails

    def pin_threads(self) -> None:
        pass

    def run(self, samples: Sequence[dict[str, Any]]) -> list[Any]:
        self.asked += [float(sample["inputs"]) for sample in samples]
        self.types |= {str(sample["inputs"].dtype) for sample in samples}
        return [ValueError("no")] * len(samples) if self._fails else list(samples)


def version_of(recorder: Recorder) -> ModelVersion:
    return in_process(recorder, Batcher(policy=Greedy()))


def test_traffic_is_divided_in_exact_proportion() -> None:
    async def scenario() -> None:
        versions = [version_of(Recorder(str(number))) for number in (1, 2, 3)]
        endpoint = Endpoint(
            "m", [Share(version, per_cent) for version, per_cent in zip(versions, (85, 10, 5), strict=True)]
        )
        for _ in range(3):
            counts = Counter(endpoint.pick().version for _ in range(100))
            assert counts == {"1": 85, "2": 10, "3": 5}

    asyncio.run(scenario())


def test_a_version_without_traffic_answers_those_that_name_it() -> None:
    async def scenario() -> None:
        one, two = Recorder("1"), Recorder("2")
        endpoint = Endpoint("m", [Share(version_of(one), 100), Share(version_of(two), 0)])
        sample = one.signature.parse(7)
        await endpoint.predict(sample)
        await endpoint.predict(sample, version="2")
        assert (one.asked, two.asked) == ([7], [7])
        assert endpoint.pick(2) is endpoint.pick("2")  # callers in Python write it as the config does
        with pytest.raises(UnknownModelError, match=r"no version 3 of the model m; there is 1, 2"):
            endpoint.pick("3")

    asyncio.run(scenario())


def test_a_shadow_sees_every_request_and_its_errors_are_nobodys() -> None:
    async def scenario() -> None:
        answering, shadow = Recorder("1"), Recorder("2", fails=True)
        shares = [Share(version_of(answering)), Share(version_of(shadow), 0, shadow=True)]
        registry = Registry({"m": shares})
        for value in range(20):
            output = await registry["m"].predict(answering.signature.parse(value))
            assert float(output["inputs"]) == value
        await registry.close()
        assert sorted(shadow.asked) == sorted(answering.asked) == list(range(20))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("spec", "takes"),
    [
        (TensorSpec("inputs", "float64", ()), True),
        (TensorSpec("inputs", "float32", (2,)), False),
        (TensorSpec("inputs", "int64", ()), False),
        (TensorSpec("others", "float32", ()), False),
    ],
)
def test_a_shadow_gets_copies_of_what_it_takes_and_it_is_said_where_it_takes_other_inputs(
    spec: TensorSpec, takes: bool
) -> None:
    async def scenario() -> None:
        answering, shadow = Recorder("1"), Recorder("2")
        shadow.signature = Signature("m", "2", (spec,), (SPEC,), 0.0)
        registry = Registry({"m": [Share(version_of(answering)), Share(version_of(shadow), 0, shadow=True)]})
        await registry["m"].predict(answering.signature.parse(7))
        await registry.close()
        assert (shadow.asked, shadow.types) == (([7], {spec.dtype}) if takes else ([], set()))
        clause = (
            "m version 2, a shadow, gets no copies of what version 1 is asked, because it takes other inputs: "
            f"{spec.name} ({spec}), not inputs (one float32)"
        )
        assert registry.uncopied == ([] if takes else [clause])

    asyncio.run(scenario())


def test_an_update_under_load_fails_no_request_and_the_old_version_gets_none_afterwards() -> None:
    async def scenario() -> None:
        old, new = Recorder("1"), Recorder("2")
        registry = Registry({"m": [Share(version_of(old))]})
        asked = [
            asyncio.ensure_future(registry["m"].predict(old.signature.parse(value), priority=value % 3))
            for value in range(200)
        ]
        await asyncio.sleep(0)
        retired = registry.update({"m": [Share(version_of(new))]})
        assert [version.version for version in retired] == ["1"]
        later = [asyncio.ensure_future(registry["m"].predict(new.signature.parse(value))) for value in range(50)]
        await asyncio.gather(*(version.close() for version in retired))
        answers = await asyncio.gather(*asked, *later)
        assert [float(answer["inputs"]) for answer in answers] == [*range(200), *range(50)]
        assert (len(old.asked), len(new.asked)) == (200, 50)
        await registry.close()

    asyncio.run(scenario())


def test_a_rollback_is_an_update_back_and_the_kept_version_is_the_same_object() -> None:
    async def scenario() -> None:
        one, two = version_of(Recorder("1")), version_of(Recorder("2"))
        registry = Registry({"m": [Share(one, 0), Share(two, 100)]})
        assert registry["m"].pick() is two
        assert registry.update({"m": [Share(one, 100), Share(two, 0)]}) == []
        assert registry["m"].pick() is one
        await registry.close()

    asyncio.run(scenario())


def test_unknown_models_are_named_with_the_nearest() -> None:
    async def scenario() -> None:
        registry = Registry({"digits": [Share(version_of(Recorder("1")))]})
        with pytest.raises(UnknownModelError, match="did you mean digits"):
            registry["digit"]
        assert registry.default.name == "digits"
        with pytest.raises(UnknownModelError, match="no model yet"):
            _ = Registry().default
        with pytest.raises(ValueError, match="gets traffic"):
            Endpoint("m", [Share(version_of(Recorder("1")), 0)])

    asyncio.run(scenario())


def test_a_thread_that_hangs_is_replaced_and_its_batch_fails_alone() -> None:
    class Hangs(Recorder):
        go_on = threading.Event()

        def run(self, samples: Sequence[dict[str, Any]]) -> list[Any]:
            if float(samples[0]["inputs"]) == 1:
                self.go_on.wait(PATIENCE_S)
            return super().run(samples)

    async def scenario() -> None:
        model = Hangs("1")
        version = in_process(model, Batcher(policy=Greedy(), run_timeout_s=2.0))
        with pytest.raises(RunTimeoutError):
            await version.predict(model.signature.parse(1))
        assert float((await version.predict(model.signature.parse(2)))["inputs"]) == 2
        Hangs.go_on.set()
        await version.close()

    asyncio.run(scenario())


def test_every_client_gets_its_own_answer_whatever_the_interleaving() -> None:
    async def scenario() -> None:
        model = served_linear()
        version = in_process(model, Batcher(max_batch_size=5))

        async def client(number: int) -> None:
            for turn in range(10):
                sample = model.signature.parse([number, turn, 1, 0])
                (wanted,) = alone.run([sample])
                assert isinstance(wanted, dict)
                got = await version.predict(sample)
                assert abs(got["outputs"] - wanted["outputs"]).max() <= 1e-6

        alone = served_linear()
        await asyncio.gather(*(client(number) for number in range(7)))
        await version.close()

    asyncio.run(scenario())


def test_a_version_that_fails_at_its_end_keeps_no_other_from_answering_what_it_has() -> None:
    async def fails() -> None:
        raise OSError("gone")

    async def answer(samples: Sequence[Any]) -> list[Any]:
        await started.wait()
        return list(samples)

    async def run() -> None:
        first, second = (Batcher[Any, Any](policy=Greedy()) for _ in range(2))
        second.add_runner(answer)
        versions = [ModelVersion(Recorder("1").signature, first, fails), ModelVersion(Recorder("2").signature, second)]
        registry = Registry({str(place): [Share(version)] for place, version in enumerate(versions)})
        waiting = asyncio.ensure_future(second.submit({"inputs": 3.0}))
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(registry.close())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not closing.done()
        started.set()
        with pytest.raises(OSError, match="gone"):
            await closing
        assert waiting.done()
        assert await waiting == {"inputs": 3.0}

    started = asyncio.Event()
    asyncio.run(asyncio.wait_for(run(), 60))
