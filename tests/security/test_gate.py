"""Tokens, their file, quotas and certificates, each by itself."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from omni_loop.client import Tls, connect
from omni_loop.clock import FakeClock
from omni_loop.endpoints import AccessConfig, QuotaConfig, TlsConfig
from omni_loop.errors import Code, ConfigError, Exhausted, InvalidInput, OmniLoopError, Reason
from omni_loop.serve import tls
from omni_loop.serve.auth import Gate, shelf, stored_name
from omni_loop.serve.tokens import read_tokens
from omni_loop.testing.certificates import Authority

TOKEN, OTHER = "t" * 32, "o" * 32


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def write(text: str, mode: int = 0o600) -> str:
        path = tmp_path / "tokens"
        path.write_text(text)
        path.chmod(mode)
        return str(path)

    return write


def test_a_token_names_its_principal(write: Callable[..., str]) -> None:
    gate = Gate(AccessConfig(tokens=write(f"# ours\nrobot {TOKEN}\n\nrobot {OTHER}\nlab {TOKEN}2\n")))
    assert [gate.authenticate(f"Bearer {t}") for t in (TOKEN, OTHER, f"{TOKEN}2")] == ["robot", "robot", "lab"]
    assert gate.authenticate(f"bearer {TOKEN}") == "robot"
    texts = set()
    for header in (
        None,
        "",
        "Bearer",
        TOKEN,
        f"Basic {TOKEN}",
        f"Bearer  {TOKEN}",
        f"Bearer {TOKEN[:-1]}",
        "Bearer \udcff",
    ):
        with pytest.raises(OmniLoopError) as refused:
            gate.authenticate(header)
        assert (refused.value.code, refused.value.reason) == (Code.UNAUTHENTICATED, Reason.BAD_TOKEN)
        texts.add(refused.value.text)
    assert len(texts) == 1


def test_tokens_are_not_kept_as_they_are(write: Callable[..., str]) -> None:
    tokens = read_tokens(write(f"robot {TOKEN}"))
    assert TOKEN not in repr(vars(tokens))
    assert TOKEN.encode().hex() not in repr(vars(tokens))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_token_file_that_others_may_read_is_refused(write: Callable[..., str], mode: int) -> None:
    with pytest.raises(ConfigError, match="others may read"):
        read_tokens(write(f"robot {TOKEN}", mode))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no token"),
        ("robot", "1 words"),
        (f"robot {TOKEN} more", "3 words"),
        ("robot short", "5 characters"),
        (f"../x {TOKEN}", "no principal"),
        (f"a {TOKEN}\nb {TOKEN}", "line 2"),
        (f"robot {TOKEN}é", "ASCII"),
    ],
)
def test_a_wrong_line_is_named_without_what_it_holds(write: Callable[..., str], text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        read_tokens(write(text))
    assert TOKEN not in refused.value.text


def test_bytes_are_counted_by_principal_and_come_back_with_time() -> None:
    clock = FakeClock()
    gate = Gate(AccessConfig(quota=QuotaConfig(bytes_per_s=1000), quotas={"free": QuotaConfig()}), clock)
    gate.charge("a", 1000)
    with pytest.raises(Exhausted) as over:
        gate.charge("a", 500)
    assert over.value.reason is Reason.QUOTA
    assert over.value.retry_after_ms == pytest.approx(500)
    gate.charge("b", 1000)
    gate.charge("free", 1 << 40)
    asyncio.run(clock.advance(0.5))
    gate.charge("a", 500)
    asyncio.run(clock.advance(1.0))
    gate.charge("a", 5000)  # larger than a second's worth: taken when the bucket is full, and paid for afterwards
    asyncio.run(clock.advance(4.5))
    with pytest.raises(Exhausted):
        gate.charge("a", 1000)
    asyncio.run(clock.advance(0.5))
    gate.charge("a", 1000)


def test_streams_end_when_they_fail() -> None:
    gate = Gate(AccessConfig(quota=QuotaConfig(streams=1)))
    for _ in range(2):
        with gate.stream("a"), gate.stream("b"), pytest.raises(Exhausted), gate.stream("a"):
            pass
        with pytest.raises(ValueError, match="inside"), gate.stream("a"):
            raise ValueError("inside")


def test_snapshots_of_two_principals_never_share_a_name() -> None:
    assert stored_name("", "x") == "x"
    assert stored_name("a", "x") != stored_name("b", "x")
    assert stored_name("a", "x").startswith(shelf("a"))
    with pytest.raises(InvalidInput, match="at most"):
        stored_name("a", "x" * 100)


def test_files_of_tls_are_read_before_anybody_is_refused(tmp_path: Path) -> None:
    authority = Authority()
    certificate, key = authority.issue("server", ("127.0.0.1",)).write(tmp_path, "server")
    assert "GMT" in tls.until(TlsConfig(certificate=certificate, key=key))
    os.chmod(key, 0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        tls.credentials(TlsConfig(certificate=certificate, key=key))
    ended, ended_key = authority.issue("server", days=-1).write(tmp_path, "ended")
    with pytest.raises(ConfigError, match="expired"):
        tls.context(TlsConfig(certificate=ended, key=ended_key))


@pytest.mark.parametrize("token", ["", " ", "a b", "é" * 20, "x\n", 7])
def test_a_client_refuses_a_token_that_cannot_be_without_showing_it(token: object) -> None:
    with pytest.raises(InvalidInput) as refused:
        connect("127.0.0.1:1", token=token)  # type: ignore[arg-type]
    assert "visible ASCII" in refused.value.text


def test_a_client_refuses_files_that_are_no_pem(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text")
    for wrong in (Tls(tmp_path / "none"), Tls(tmp_path / "text"), Tls(b"text"), Tls(certificate=b"-----BEGIN")):
        with pytest.raises(InvalidInput, match=r"tls"):
            connect("127.0.0.1:1", tls=wrong)
    assert "BEGIN" not in repr(Tls(b"-----BEGIN"))


def test_a_token_in_the_clear_is_said(caplog: pytest.LogCaptureFixture) -> None:
    connect("127.0.0.1:1", token=TOKEN).close()
    assert not caplog.records
    connect("192.168.7.7:1", token=TOKEN).close()
    assert "in the clear" in caplog.text
    assert TOKEN not in caplog.text
