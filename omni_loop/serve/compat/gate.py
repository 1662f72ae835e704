"""Who calls, as clients of other protocols say it."""

from __future__ import annotations

from typing import Any


def bearer(header: str | None) -> str | None:
    """openpi's clients write ``Api-Key <key>`` where others write ``Bearer <key>``."""
    scheme, _, key = (header or "").partition(" ")
    return f"Bearer {key.strip()}" if scheme.lower() == "api-key" else header


def common_name(certificate: dict[str, Any] | None) -> str:
    """Of a client's certificate, as :mod:`ssl` shows it; "" where there is none."""
    names = (pair for part in (certificate or {}).get("subject", ()) for pair in part)
    return next((str(value) for kind, value in names if kind == "commonName"), "")
