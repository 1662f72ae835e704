"""Plain arguments, checked before anything is sent: whatever cannot be right raises
:class:`~omni_loop.errors.InvalidInput` that names the argument, what it was and what is right."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..errors import SHOWN, InvalidInput, nearest
from ..wire import codec

ENCODINGS = ("raw", "png", "jpeg")
YEAR_S = 365 * 86_400
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


def whole(name: str, value: Any, most: int) -> int:
    """A whole number from 0 to ``most``; numpy's integers too."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InvalidInput(f"{name} is {_shown(value)}; it must be a whole number")
    if not 0 <= value <= most:
        raise InvalidInput(f"{name} is {_shown(value)}; it must be at least 0 and at most {most}")
    return int(value)


def duration(name: str, value: Any) -> float:
    """A finite number from 0 on; numpy's too."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise InvalidInput(f"{name} is {_shown(value)}; it must be a number of milliseconds, or 0 for none")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and number >= 0):
        raise InvalidInput(f"{name} is {_shown(value)}; it must be finite and at least 0, where 0 means none")
    return number


def seconds(name: str, value: Any) -> float:
    """A number of seconds above 0 and of at most a year: gRPC takes more for a time that is over."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise InvalidInput(f"{name} is {_shown(value)}; it must be a number of seconds")
    if not 0 < value <= YEAR_S:  # false for NaN too
        raise InvalidInput(f"{name} is {_shown(value)}; it must be above 0 and at most {YEAR_S} seconds")
    return float(value)


def address(name: str, value: Any) -> str:
    """``host:port`` as gRPC takes it; an IPv6 host stands in brackets."""
    example = "it must be host:port, such as 127.0.0.1:50051"
    host, _, port = text(name, value, codec.MAX_NAME).rpartition(":")
    if not host or not port:
        raise InvalidInput(f"{name} is {_shown(value)}; {example}")
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise InvalidInput(f"{name} is {_shown(value)}, whose port is no number from 1 to 65535; {example}")
    if host.startswith("["):
        if not _is_ip6(host[1:-1]) or host[-1] != "]":
            raise InvalidInput(f"{name} is {_shown(value)}, whose host is no IPv6 address; write [::1]:50051")
    elif ":" in host and _is_ip6(host):
        raise InvalidInput(f"{name} is {_shown(value)}; an IPv6 host stands in brackets: [{host}]:{port}")
    elif not _HOST.fullmatch(host):
        raise InvalidInput(f"{name} is {_shown(value)}, whose host is no name and no IPv4 address; {example}")
    return f"{host}:{port}"


def _is_ip6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def text(name: str, value: Any, most: int | None = None) -> str:
    """Text of at most ``most`` characters, without lone surrogates, which do not travel."""
    if not isinstance(value, str):
        raise InvalidInput(f"{name} is {_shown(value)}; it must be text")
    if most is not None:
        codec.check_name(name, value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"{name} is {_shown(value)}, which is not valid UTF-8; it must be") from None
    return value


def names(name: str, value: Any) -> tuple[str, ...]:
    """A sequence of names; a single text is none."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise InvalidInput(f"{name} is {_shown(value)}; it must be a sequence of observation keys")
    return tuple(text(f"a key in {name}", key, codec.MAX_NAME) for key in value)


def check_options(name: str, value: Any) -> dict[str, str]:
    """Options as they travel: text, numbers and true/false by name, all as text."""
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{name} is {_shown(value)}; it must be a mapping of names to values")
    sent = {}
    for key, option in value.items():
        text(f"a name in {name}", key, codec.MAX_NAME)
        if not isinstance(option, (str, int, float, np.generic)):
            raise InvalidInput(f"{name}[{key!r}] is {_shown(option)}; it must be text, a number or true/false")
        sent[key] = text(f"{name}[{key!r}]", str(option), codec.MAX_NAME)
    return sent


def check_encoding(name: str, value: Any) -> None:
    if value not in ENCODINGS:
        raise InvalidInput(
            f"{name} is {_shown(value)}; it must be one of {', '.join(ENCODINGS)}."
            + (nearest(value, ENCODINGS) if isinstance(value, str) else "")
        )


def _shown(value: Any) -> str:
    """``value`` as a text may repeat it: whole when short, and never taking long."""
    if isinstance(value, str):
        return repr(value) if len(value) <= SHOWN else f"{value[:SHOWN]!r}..."
    if isinstance(value, int) and value.bit_length() > 4 * SHOWN:
        return f"{'-' if value < 0 else ''}2^{value.bit_length() - 1} or more"
    if value is None or isinstance(value, (bool, int, float, np.generic)):
        return str(value)
    return f"a {type(value).__name__}"
