"""Who is asked and by what right; and that the right is never told."""

from __future__ import annotations

import base64

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from emulator.core.bench.redaction import Redaction, shown_url
from emulator.core.bench.target import RouterTarget, Target, base_url, credentials, is_router
from emulator.core.errors import ConfigError

COMPLETIONS = "/v1/completions"
PASSWORD = "opensesame"


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://127.0.0.1:8000", COMPLETIONS),
        ("http://127.0.0.1:8000/", COMPLETIONS),
        ("http://127.0.0.1:8000/v1", COMPLETIONS),
        ("http://127.0.0.1:8000/v1/", "/v1/chat/completions"),
        ("http://127.0.0.1:8000/v1/chat/completions", "/v1/chat/completions"),
        ("http://me:opensesame@127.0.0.1:8000/v1", COMPLETIONS),
    ],
)
def test_a_url_may_have_the_path_of_the_api_and_credentials(url: str, endpoint: str) -> None:
    assert base_url(url, endpoint) == "http://127.0.0.1:8000"


def test_a_path_before_the_api_stays() -> None:
    assert base_url("https://host/proxy/v1", COMPLETIONS) == "https://host/proxy"


def test_the_endpoint_says_which_api_is_spoken() -> None:
    assert Target(base_url="", endpoint="/v1/chat/completions").backend == "openai-chat"
    assert Target(base_url="", endpoint=COMPLETIONS).backend == "openai"


def test_a_routers_url_is_told_apart() -> None:
    assert is_router("tcp://127.0.0.1:5555")
    assert not is_router("http://127.0.0.1:5555")


def test_credentials_are_read_as_they_are_meant() -> None:
    assert credentials("http://host") is None
    assert credentials("http://me:p%40ss@host") == ("me", "p@ss")
    assert credentials("http://token@host") == ("token", "")


@pytest.mark.parametrize(
    "url",
    [
        f"ftp://me:{PASSWORD}@host",
        f"http://me:{PASSWORD}/x@host",
        f"http://me:{PASSWORD}@host:99999",
        f"me:{PASSWORD}@host:8000",
        f"http://me:{PASSWORD}@host/?key={PASSWORD}",
        f"http://host/?key={PASSWORD}",
    ],
)
def test_a_url_that_is_refused_is_not_told_with_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match="--url") as refused:
        base_url(url, COMPLETIONS)
    assert PASSWORD not in str(refused.value)


@example("C", "//", "@host", "")
@given(
    before=st.text("SECRET", max_size=3),
    secret=st.text("SECRET:/?#@&=%", min_size=1),
    after=st.sampled_from(["@host", "@host:8000/v1", "@host/?q=SECRET", "@"]),
    scheme=st.sampled_from(["http://", "https://", ""]),
)
def test_no_url_is_shown_with_what_stands_before_the_host(before: str, secret: str, after: str, scheme: str) -> None:
    shown = shown_url(f"{scheme}{before}:{secret}{after}")
    assert not set("SECRET") & set(shown)


def test_a_url_without_secrets_is_shown_as_it_is() -> None:
    for url in ("http://host:8000/v1", "127.0.0.1:8000", "tcp://10.0.0.1:5555"):
        assert shown_url(url) == url


def _target(**more: object) -> Target:
    return Target(base_url="http://host", endpoint=COMPLETIONS, **more)  # type: ignore[arg-type]


def test_who_asks_is_said_by_header_or_url_or_key_in_that_order() -> None:
    basic = base64.b64encode(b"me:opensesame").decode()
    everything = {"api_key": "sk-1", "credentials": ("me", PASSWORD)}
    assert _target().sent_headers == {}
    assert _target(api_key="sk-1").sent_headers == {"Authorization": "Bearer sk-1"}
    assert _target(**everything).sent_headers == {"Authorization": f"Basic {basic}"}
    given = {"authorization": "Token t", "X-Tenant": "blue"}
    assert _target(**everything, headers=given).sent_headers == given


def test_whatever_identifies_who_asks_is_hidden() -> None:
    headers = {"X-Api-Key": "header-secret", "Cookie": "Session 0123456789", "X-Tenant": "blue"}
    hidden = _target(api_key="sk-1", credentials=("me", PASSWORD), headers=headers).redaction
    basic = base64.b64encode(b"me:opensesame").decode()
    for secret in ("sk-1", PASSWORD, basic, "header-secret", "Session 0123456789", "0123456789"):
        assert hidden(f"a bad {secret}!") == "a bad ***!"
    assert hidden("me and blue") == "me and blue"
    assert Redaction()("as it was") == "as it was"
    assert Redaction(["abc", "abcdef"])("abcdef abc") == "*** ***"


def test_a_target_is_not_printed_with_its_secrets() -> None:
    told = repr(_target(api_key="sk-1", credentials=("me", PASSWORD), headers={"X-Api-Key": "header-secret"}))
    told += repr(RouterTarget(endpoint="tcp://host:1", secret="cluster-secret"))
    for secret in ("sk-1", PASSWORD, "header-secret", "cluster-secret"):
        assert secret not in told
