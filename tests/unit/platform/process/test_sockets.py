from __future__ import annotations

import socket
from pathlib import Path

import pytest

from orchestray.platform.errors import ConfigError, OrchestrayError
from orchestray.platform.process.sockets import free_ports, is_local, listen, listens, url_of


def test_a_port_is_taken_from_when_it_is_listened_at_also_where_nobody_answers_yet() -> None:
    with listen("127.0.0.1", 0, key="http.host") as silent:
        port = silent.getsockname()[1]
        with pytest.raises(OrchestrayError, match=f"could not listen on 127.0.0.1:{port}: address already in use;"):
            listen("127.0.0.1", port, key="http.host")
        assert listens("127.0.0.1", port, 10.0)
    assert not listens("127.0.0.1", port, 10.0)


def test_free_ports_differ_and_are_none_that_the_kernel_gives_to_connections() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = free_ports(50)
    assert len(set(ports)) == 50
    assert not any(first <= port <= last for port in ports)
    assert not any(listens("127.0.0.1", port, 1.0) for port in ports)


def test_a_host_that_there_is_not_is_named_by_the_key_it_was_given_by() -> None:
    with pytest.raises(ConfigError, match=r"^http\.host: there is no host 'no\.such\.host\.invalid' .*127\.0\.0\.1$"):
        listen("no.such.host.invalid", 0, key="http.host")


def test_an_address_of_another_machine_is_not_answered_with_the_advice_to_take_another_port() -> None:
    with pytest.raises(ConfigError, match=r"^http\.host: this machine has no address 192\.0\.2\.250; "):
        listen("192.0.2.250", 0, key="http.host")


def test_addresses_that_only_this_machine_can_reach_are_told_from_the_others() -> None:
    given = ("127.0.0.1", "localhost", "::1", "0.0.0.0", "192.0.2.1")  # noqa: S104
    assert [is_local(host) for host in given] == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("host", "named"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("a.b", "a.b")],  # noqa: S104
)
def test_a_url_is_one_that_a_browser_of_this_machine_can_open(host: str, named: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert url_of(listening, host, scheme="https") == f"https://{named}:{port}"
