"""Bearer tokens: who a caller is. Kept as keyed hashes, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable

from ..errors import ConfigError
from ..texts import NAME
from .private import read_private

LEAST = 16  # characters; ``openssl rand -hex 32`` gives 64
_MOST = 1024
_SCHEME = "bearer"


class Tokens:
    """Known tokens and whose they are. A memory dump shows hashes under a key that is drawn at start."""

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._key = secrets.token_bytes(32)
        self._known = [(self._hash(token), principal) for principal, token in pairs]

    @property
    def principals(self) -> frozenset[str]:
        return frozenset(principal for _, principal in self._known)

    def whose(self, header: str | None) -> str | None:
        """The principal of an ``authorization`` header, ``Bearer <token>``; None: nobody's. Takes the same time
        whichever token fits, or none: all are compared, and what is compared are hashes of one length."""
        scheme, _, token = (header or "").partition(" ")
        given = self._hash(token[: _MOST + 1])
        found: str | None = None
        for digest, principal in self._known:
            if hmac.compare_digest(digest, given):
                found = principal
        return found if scheme.lower() == _SCHEME else None

    def _hash(self, token: str) -> bytes:
        return hashlib.blake2b(token.encode("utf-8", "surrogatepass"), key=self._key).digest()


def read_tokens(path: str) -> Tokens:
    """The tokens of a file of ``principal token`` lines; a principal may have several, while one is replaced.

    Raises:
        ConfigError: others may read the file, or a line is not right. Its number is named, never what it holds.
    """
    what = "access.tokens"
    try:
        text = read_private(path, what).decode("ascii")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what}: {path!r} holds other than ASCII at byte {error.start}") from None
    pairs: dict[str, str] = {}  # principal by token
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if why := _wrong(words, pairs):
            raise ConfigError(f"{what}: line {number} of {path!r} {why}")
        pairs[words[1]] = words[0]
    if not pairs:
        raise ConfigError(f"{what}: {path!r} names no token, so nobody could call")
    return Tokens((principal, token) for token, principal in pairs.items())


def _wrong(words: list[str], pairs: dict[str, str]) -> str:
    """What is not right about a line; empty: nothing."""
    if len(words) != 2:
        return f"has {len(words)} words; it must be 'principal token'"
    principal, token = words
    if not NAME.fullmatch(principal):
        return "names no principal: 1 to 100 letters, digits, dots, dashes and underscores, the first no dot"
    if not LEAST <= len(token) <= _MOST:
        return f"has a token of {len(token)} characters; from {LEAST} to {_MOST}, such as 'openssl rand -hex 32' gives"
    if token in pairs:
        return "repeats a token of a line before"
    return ""
