"""HTTPS: the server with a certificate of its own, keys that do not fit, and a client that takes any certificate."""

from __future__ import annotations

import json
import socket
import ssl
from pathlib import Path

import httpx
import pytest

from orchestray.platform.errors import ConfigError
from orchestray.serving.config.schema import HttpSection, TlsSection
from orchestray.serving.http import HttpSettings, Monitor
from orchestray.serving.http.overload.shedding import LoadShedder
from orchestray.serving.http.server.http_server import HttpServer
from orchestray.serving.routing.registry import Registry
from support.certificates import NEEDS_OPENSSL, written_pair
from support.cli import orchestray_here
from support.http_endpoint import ROW_SUMS, listening

pytestmark = NEEDS_OPENSSL
SAMPLE = {"inputs": ROW_SUMS.example}


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsSection:
    return written_pair(tmp_path_factory.mktemp("tls"))


def test_who_trusts_the_certificate_is_answered_over_https_and_nobody_else_is(tls: TlsSection) -> None:
    with listening(http=HttpSection(tls=tls)) as url:
        assert url.startswith("https://")
        trusting = ssl.create_default_context(cafile=tls.certificate)
        answer = httpx.post(f"{url}/predict", json=SAMPLE, verify=trusting)
        assert (answer.status_code, answer.json()["outputs"]) == (200, [6.0, 15.0])
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            httpx.post(f"{url}/predict", json=SAMPLE)
        with pytest.raises(httpx.TransportError):
            httpx.post(url.replace("https", "http") + "/predict", json=SAMPLE)


@pytest.mark.parametrize("key", ["of another certificate", "no key at all", "not there"])
def test_a_key_that_does_not_fit_is_a_sentence(tls: TlsSection, tmp_path: Path, key: str) -> None:
    wrong = tmp_path / "key.pem"
    if key == "of another certificate":
        written_pair(tmp_path)
    elif key == "no key at all":
        wrong.write_text("open sesame")
    http = HttpSection(tls=TlsSection(certificate=tls.certificate, key=str(wrong)))
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(ConfigError, match=r"http\.tls: the certificate or its key cannot be used"),
    ):
        HttpServer(None, listener, http, shedding=LoadShedder(Monitor(), HttpSettings(), Registry()))


def test_bench_takes_a_certificate_that_nobody_vouches_for_only_where_it_is_told_to(tls: TlsSection) -> None:
    with listening(http=HttpSection(tls=tls)) as url:
        once = ["--clients", "1", "--duration-s", "2", "--warm-up-s", "0", "--processes", "1"]
        short = ("bench", url, *once, "--json")
        refused = orchestray_here(*short)
        assert refused.returncode != 0
        assert "--insecure takes it as it is" in refused.stderr
        done = orchestray_here(*short, "--insecure")
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout.splitlines()[-1])
        assert (told["num_ok"] > 0, told["num_failed"]) == (True, 0)
