"""Messages between processes as bytes: msgpack of ``[tag, ...]``, decoded against their types; never pickle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from .. import messages
from ..errors import InvalidInput, Reason
from ..messages import Command, Report

_COMMANDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        messages.OpenSession,
        messages.RunStage,
        messages.Commit,
        messages.Discard,
        messages.ResetSession,
        messages.ForkSession,
        messages.RewindSession,
        messages.ExportSession,
        messages.ImportSession,
        messages.CloseSession,
        messages.ReleasePayloads,
        messages.Probe,
    )
}
_REPORTS: dict[str, type] = {kind.__name__: kind for kind in (messages.Done, messages.Failed, messages.Part)}
_DECODERS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    tag: msgspec.msgpack.Decoder(kind) for tag, kind in (_COMMANDS | _REPORTS).items()
}


class _Envelope(msgspec.Struct, array_like=True, frozen=True):
    tag: str
    request: int
    sent_ns: int  # time.monotonic_ns(), which processes of one host share
    body: msgspec.Raw


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "item"):  # a numpy scalar among the parameters
        return value.item()
    raise NotImplementedError(type(value).__name__)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_OPENER = msgspec.msgpack.Decoder(_Envelope)


def pack(request: int, message: Command | Report, sent_ns: int = 0) -> bytes:
    """Bytes of one message. Raises InvalidInput for values that are neither numbers, text nor bool."""
    try:
        body = msgspec.Raw(_ENCODER.encode(message))
        return _ENCODER.encode(_Envelope(type(message).__name__, request, sent_ns, body))
    except (NotImplementedError, OverflowError, TypeError) as e:
        raise InvalidInput(f"a {type(message).__name__} cannot be sent: {e}") from e


def unpack(data: bytes) -> tuple[int, Command | Report, int]:
    """``(request, message, sent_ns)``. Raises InvalidInput for bytes that are no message."""
    try:
        envelope = _OPENER.decode(data)
        return envelope.request, _DECODERS[envelope.tag].decode(envelope.body), envelope.sent_ns
    except (KeyError, msgspec.DecodeError) as e:
        raise InvalidInput(f"a runner got bytes that are no message: {e}", reason=Reason.BAD_REQUEST) from e
