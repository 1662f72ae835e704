"""What a recorded part says of itself in its attributes: read, and checked before anything relies on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..types import SessionSpec
from .files import NODE

Count = Annotated[int, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class Begin(_Strict):
    """How an episode began; ``source``: the session it was forked from, or the snapshot."""

    model_config = ConfigDict(extra="allow")

    event: Literal["open", "fork", "restore", "reset"]
    order: Count
    source: str
    epoch: Count
    tick: Count
    seq: Count
    step: Count
    seed: int
    prompt: str


class About(_Strict):
    """One part. ``lost`` of its ``ticks`` are without arrays; ``ended``: the episode ends in it."""

    session: str
    episode: Count
    part: Count
    spec: SessionSpec
    keys: tuple[str, ...]
    kept: tuple[str, ...]
    options: dict[str, Any]
    begin: Begin
    ticks: Count
    lost: Count
    gaps: Count
    ended: bool = False


class _Attributes(_Strict):
    episode: About


class _Group(_Strict):
    attributes: _Attributes


def read(folder: Path) -> About:
    """The attributes of the part in ``folder``. Raises OSError, or ValueError that names what is wrong."""
    try:
        return _Group.model_validate_json((folder / NODE).read_bytes()).attributes.episode
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(name) for name in first["loc"]) or NODE
        raise ValueError(f"{at}: {first['msg']}") from error
