"""The requests of a target, and the URLs that name one."""

from __future__ import annotations

import pytest

from orchestray.loadtest.plan import Target, parse_url
from orchestray.platform.errors import ConfigError


def test_a_request_is_complete_as_it_is_sent() -> None:
    target = Target("::1", 8443, "/a?b", "PUT", True, False, (("A", "b"),), (b"\x00\xff", b""))
    assert target.url == "https://[::1]:8443/a?b"
    head = b"PUT /a?b HTTP/1.1\r\nHost: [::1]:8443\r\nContent-Type: application/json\r\nA: b\r\n"
    assert target.requests() == [
        head + b"Content-Length: 2\r\n\r\n\x00\xff",
        head + b"Content-Length: 0\r\n\r\n",
    ]


def test_fields_that_are_given_take_the_place_of_those_that_are_always_sent() -> None:
    given = [("host", "other"), ("content-type", "text/plain"), ("x", "1"), ("x", "2")]
    assert Target("h", 80, "/", headers=tuple(given), bodies=(b"",)).fields == given


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("127.0.0.1:8000", "must begin with http:// or https://"),
        ("ftp://host/", "must be an http or https URL"),
        ("http://", "must be an http or https URL"),
        ("http://host:port/", "is no URL"),
        ("http://host:99999/", "is no URL"),
        ("http://host/a b", "must be an http or https URL"),
    ],
)
def test_what_is_no_url_is_refused(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_url(url)
