"""Row S1: whoever has not the right certificates, or speaks plaintext, is refused before any handler."""

from __future__ import annotations

import asyncio
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...client import Tls, connect_async
from ...config import Deployment, Listen
from ...endpoints import AccessConfig, TlsConfig
from ...errors import ConfigError, ServerUnavailable
from ...serve.app import Server
from ...serve.tls import credentials
from ..board import Broken, NotRun, expect
from ..certificates import Authority, Pair
from .served import Served, served

CALL_S = 20.0
_HERE = ("127.0.0.1",)
_PUBLIC = ("0.0.0.0", "::", "192.168.7.7", "robots.example", "")


def measure(seed: int, full: bool) -> float:
    """Connections and binds refused."""
    if find_spec("cryptography") is None:
        raise NotRun("cryptography is not installed (extra dev)")
    # Sessions and blocks are counted by the bed; threads are not: gRPC's own one outlives calls that were aborted.
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_measure(Path(folder)))


async def _measure(folder: Path) -> float:
    ours, others = Authority("ours"), Authority("others")
    mutual = _config(folder, ours.issue("server", _HERE), ours.pem)
    robot = _own(ours.issue("robot"))
    wrong: dict[str, Tls | None] = {
        "plaintext": None,
        "no certificate": Tls(ca=ours.pem),
        "a certificate of another authority": Tls(ours.pem, *_own(others.issue("robot"))),
        "a certificate that has ended": Tls(ours.pem, *_own(ours.issue("robot", days=-1.0))),
        "another authority's trust": Tls(others.pem, *robot),
    }
    async with served(access=AccessConfig(tls=mutual)) as made:
        refused = await _all_refused(made, wrong)
        await _refused(made, "another name", Tls(ours.pem, *robot), f"localhost:{made.address.rpartition(':')[2]}")
        await _served(made, Tls(ours.pem, *robot))
    one_way = mutual.model_copy(update={"client_ca": None})
    async with served(access=AccessConfig(tls=one_way)) as made:
        refused += await _all_refused(made, {"plaintext": None, "another authority's trust": Tls(others.pem)})
        await _served(made, Tls(ca=ours.pem))
    return refused + 1 + _bad_files(folder, ours, mutual) + _public_binds()


async def _all_refused(made: Served, wrong: dict[str, Tls | None]) -> int:
    for what, tls in wrong.items():
        await _refused(made, what, tls)
    return len(wrong)


async def _refused(made: Served, what: str, tls: Tls | None, address: str = "") -> None:
    reached = _count(made)
    async with connect_async(address or made.address, timeout_s=CALL_S, tls=tls) as client:
        try:
            await client.info()
        except ServerUnavailable:
            expect(not reached, f"{what}: the call was refused after it had reached the server")
            return
    raise Broken(f"{what}: the call was answered")


async def _served(made: Served, tls: Tls) -> None:
    reached = _count(made)
    async with connect_async(made.address, timeout_s=CALL_S, tls=tls) as client:
        expect((await client.info()).ready, "a client with the right certificates is not served")
    expect(bool(reached), "calls that reach the server are not counted: this row proves nothing")


def _count(made: Served) -> list[object]:
    """Grows with every message that a handler reads."""
    seen: list[object] = []
    parse = type(made.server.service.decoder).parse.__get__(made.server.service.decoder)

    async def counted(kind: Any, raw: bytes) -> Any:
        seen.append(kind)
        return await parse(kind, raw)

    made.server.service.decoder.parse = counted  # type: ignore[method-assign]
    return seen


def _bad_files(folder: Path, ours: Authority, good: TlsConfig) -> int:
    """Files of a deployment that a server must not start with."""
    path = str(folder / "other")
    ended, ended_key = ours.issue("server", _HERE, days=-1.0).write(folder, "ended")
    _, others_key = ours.issue("server", _HERE).write(folder, "swapped")
    open_key = folder / "open.key"
    open_key.write_bytes(Path(good.key).read_bytes())
    open_key.chmod(0o644)
    (folder / "text").write_text("no PEM")
    wrong = [
        {"certificate": ended, "key": ended_key},
        {"key": others_key},
        {"key": str(open_key)},
        {"key": path},
        {"certificate": path},
        {"certificate": str(folder / "text")},
        {"client_ca": str(folder / "text")},
    ]
    for update in wrong:
        try:
            credentials(good.model_copy(update=update))
        except ConfigError:
            continue
        raise Broken(f"TLS begins with unusable files: {', '.join(update)}")
    return len(wrong)


def _public_binds() -> int:
    for host in _PUBLIC:
        listen = Listen(host=host, port=0)
        deployment = Deployment(pipelines=("toy",)).model_copy(update={"listen": listen})  # as ``serve --host`` does
        try:
            Server(deployment)._made()
        except ConfigError:
            continue
        raise Broken(f"a server without a token or TLS would listen on {host!r}")
    return len(_PUBLIC)


def _config(folder: Path, pair: Pair, authority: bytes) -> TlsConfig:
    certificate, key = pair.write(folder, "server")
    (folder / "ca.pem").write_bytes(authority)
    return TlsConfig(certificate=certificate, key=key, client_ca=str(folder / "ca.pem"))


def _own(pair: Pair) -> tuple[bytes, bytes]:
    return pair.certificate, pair.key
