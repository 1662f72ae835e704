"""Folders that are whole or refused: a manifest with the size and the digest of every file in them.

A manifest begins with a digest of its own text. Reading believes nothing: the manifest must agree with itself, and the
files with the manifest, in number, size and content, before anything in them is parsed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

MANIFEST = "manifest"
_MAX_MANIFEST = 16 << 20
_DIGEST = 32  # bytes


class Corrupt(Exception):
    """What of a folder is not as it was written."""


class OtherVersion(Exception):
    """A whole folder, and yet none that this version reads."""


@dataclass(frozen=True, slots=True)
class Seal:
    """Bytes on disk, the manifest's among them, and the manifest's digest."""

    nbytes: int
    digest: str


def seal(folder: Path, version: int) -> Seal:
    """Write the manifest over what lies in ``folder``, so that all of it outlives a power cut."""
    known: dict[str, list[Any]] = {}
    for path in files(folder):
        content = path.read_bytes()
        known[path.relative_to(folder).as_posix()] = [len(content), digest(content)]
        sync(path)
    text = json.dumps({"version": version, "files": known}, sort_keys=True).encode()
    own, manifest = digest(text), folder / MANIFEST
    manifest.write_bytes(own.encode() + b"\n" + text)
    sync(manifest)
    sync(folder)
    return Seal(sum(nbytes for nbytes, _ in known.values()) + manifest.stat().st_size, own)


def checked(folder: Path, version: int, most: int | None = None) -> tuple[Mapping[str, bytes], Seal]:
    """Every file's content by name, all of it as the manifest says.

    Raises:
        Corrupt: it is not. OtherVersion: it was sealed with another ``version``.
        OverflowError: it says that it holds more than ``most`` bytes, of which none was read.
        OSError: it cannot be read.
    """
    manifest = folder / MANIFEST
    if not manifest.is_file() or (nbytes := manifest.stat().st_size) > _MAX_MANIFEST:
        raise Corrupt("it has no manifest")
    own, _, text = manifest.read_bytes().partition(b"\n")
    if own != digest(text).encode():
        raise Corrupt("its manifest does not match its checksum")
    about = json.loads(text)
    if about["version"] != version:
        raise OtherVersion(f"is of version {about['version']}; this program reads version {version}")
    known: dict[str, list[Any]] = about["files"]
    found = {path.relative_to(folder).as_posix(): path for path in files(folder)}
    if odd := sorted(found.keys() ^ known.keys()):
        raise Corrupt(f"{odd[0]!r} is {'not in its manifest' if odd[0] in found else 'missing'}")
    for name, (expected, _) in known.items():  # all sizes first, so that nothing is read in vain
        if (has := found[name].stat().st_size) != expected:
            raise Corrupt(f"{name!r} has {has} bytes, expected {expected}")
        nbytes += expected
    if most is not None and nbytes > most:
        raise OverflowError(f"has {nbytes} bytes; at most {most} are read")
    content = {}
    for name, (_, expected) in known.items():
        content[name] = found[name].read_bytes()
        if digest(content[name]) != expected:
            raise Corrupt(f"{name!r} does not match its checksum")
    return content, Seal(nbytes, own.decode())


def files(folder: Path) -> list[Path]:
    """Every file under ``folder`` but the manifest; links are refused."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise Corrupt(f"{path.name!r} is no plain file")
        if path.is_file() and path != folder / MANIFEST:
            found.append(path)
    return found


def size(folder: Path) -> int:
    """Bytes of all files under ``folder``, also while others come and go."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue  # it was renamed or removed since it was listed
    return total


def sync(path: Path) -> None:
    """What lies at ``path`` outlives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def move(folder: Path, place: Path) -> None:
    """Rename ``folder`` to its sibling ``place`` for good. What both are in is held meanwhile: where somebody takes it
    elsewhere, the rename happens there, and no error is raised of what succeeded."""
    handle = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.rename(folder.name, place.name, src_dir_fd=handle, dst_dir_fd=handle)
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(content: bytes) -> str:
    return blake2b(content, digest_size=_DIGEST).hexdigest()
