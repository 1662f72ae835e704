"""Paths to write to are tried out, and nothing is left or lost by that."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from omni_loop.cli import output
from omni_loop.errors import ConfigError


def test_a_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    output.folder(tmp_path / "a" / "b", "--out", "x.json")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_file_there_keeps_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("old")
    output.folder(tmp_path, "--out", "x.json")
    output.file(tmp_path / "x.json", "--json")
    assert (tmp_path / "x.json").read_text() == "old"


def test_a_new_file_is_not_made_yet(tmp_path: Path) -> None:
    output.file(tmp_path / "a" / "x.json", "--json")
    assert list((tmp_path / "a").iterdir()) == []


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    output.file(tmp_path / "pipe", "--json")  # opening it would wait for a reader
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("file", "--out: cannot write into the folder .*file: a file is in the way"),
        ("file/below", "--out: cannot write into the folder .*below: a file is in the way"),
        ("/proc/nope", "--out: cannot write into the folder /proc/nope: No such file or directory"),
        ("n" * 300, "--out: cannot write into the folder n*: File name too long"),
    ],
)
def test_what_cannot_be_a_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x")
    with pytest.raises(ConfigError, match=f"^{text}$"):
        output.folder(Path(path), "--out")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (".", "--json: . is a folder, wanted the name of a file"),
        ("file/x", "--json: cannot write into the folder file: a file is in the way"),
        ("/proc/version", "--json: cannot write /proc/version: .*"),
        ("n" * 300, "--json: cannot write n*: File name too long"),
    ],
)
def test_what_cannot_be_a_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x")
    with pytest.raises(ConfigError, match=f"^{text}$"):
        output.file(Path(path), "--json")
