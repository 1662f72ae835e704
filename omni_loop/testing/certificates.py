"""A certificate authority for tests: makes certificates that are right, or wrong in one way. Keys of it are worth
nothing."""

from __future__ import annotations

import datetime
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, in PEM."""

    certificate: bytes
    key: bytes

    def write(self, folder: Path, name: str) -> tuple[str, str]:
        """Paths of both files; the key's is readable by its owner alone."""
        certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
        certificate.write_bytes(self.certificate)
        key.touch(mode=0o600)
        os.chmod(key, 0o600)
        key.write_bytes(self.key)
        return str(certificate), str(key)


class Authority:
    """``cryptography`` must be installed. ``pem`` is what others trust."""

    def __init__(self, name: str = "tests") -> None:
        self._name, self._key = _named(name), _key()
        self.pem = self._sign(self._name, self._key, authority=True).certificate

    def issue(self, name: str, hosts: tuple[str, ...] = (), days: float = 1.0) -> Pair:
        """A certificate of common name ``name`` for ``hosts`` (names or addresses), which ends in ``days``; below
        zero: it has ended."""
        return self._sign(_named(name), _key(), hosts, days)

    def _sign(
        self, subject: Any, key: Any, hosts: tuple[str, ...] = (), days: float = 1.0, authority: bool = False
    ) -> Pair:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization

        ends = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
        made = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(ends - datetime.timedelta(days=10))
            .not_valid_after(ends)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if hosts:
            made = made.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        signed = made.sign(self._key, hashes.SHA256())
        encoding = serialization.Encoding.PEM
        private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return Pair(signed.public_bytes(encoding), private)


def _key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _named(name: str) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
