"""The pipeline of one LeRobot checkpoint: a single act stage, whose spec is read from ``config.json``."""

from __future__ import annotations

from collections.abc import Iterator

from omni_loop.errors import ConfigError
from omni_loop.loop.pipeline import CLIENT, Edge, Pipeline, Plan, StageDef
from omni_loop.messages import PayloadKind, Scalar
from omni_loop.types import ArraySpec, Op, SessionSpec, StageKind

from .checkpoint import Described, check_tokenizer, describe, verify_here
from .families import can_join, chunk_length, executed, family_of
from .numbers import MOST_HZ, check_options

_CONTROL_HZ = 10.0  # where nobody says


def lerobot(
    name: str,
    checkpoint: str,
    control_hz: float = 0.0,
    execution_horizon: int = 0,
    ensemble: bool = False,
    ensemble_decay: float = 0.01,
    rtc: bool = False,
    inference_delay: int = 0,
    inference_steps: int = 0,
    tokenizer: str = "",
    vlm: str = "",
) -> Pipeline:
    """A pipeline called ``name`` that serves ``checkpoint``: a folder, a shipped one's name, or a hub id.

    Args:
        control_hz: control steps per second of the robot it was trained for; 0: as a card of ours says, else 10.
        execution_horizon: steps of a chunk to execute before the next; 0: as the checkpoint says.
        ensemble: average every step over all chunks that foresaw it, older ones weighing more by
            ``exp(ensemble_decay * age in chunks)`` (temporal ensembling, ACT, arXiv:2304.13705, algorithm 2). On by
            itself when the checkpoint was made for it.
        rtc: LeRobot's real-time chunking (arXiv:2506.07339): a chunk continues the one before it.
        inference_delay: steps that are executed while a chunk is made, for ``rtc``; a session may choose its own.
        inference_steps: denoising steps; 0: as the checkpoint says.
        tokenizer, vlm: folder or hub id instead of the one the checkpoint names; relative to the checkpoint's folder
            when it is there.

    Raises:
        CheckpointError: no such checkpoint, or one that cannot be served. Unsupported: a type that cannot.
        ConfigError: options that do not go together.
    """
    described = describe(checkpoint)
    family = family_of(described.type)
    folder = verify_here(checkpoint)
    horizon = chunk_length(described.type, described.settings)
    check_options(
        described.type, described.settings, ensemble_decay=ensemble_decay, inference_steps=inference_steps, vlm=vlm
    )
    if folder is not None:
        check_tokenizer(folder, tokenizer)
    coefficient = described.settings.get("temporal_ensemble_coeff")
    if coefficient is not None:
        ensemble, ensemble_decay = True, float(coefficient)
    joins = can_join(described.type, described.settings)
    if problems := [*_problems(described, horizon, control_hz, execution_horizon, ensemble, rtc, inference_delay)]:
        raise ConfigError(f"pipeline {name!r}: {'; '.join(problems)}")
    made: dict[str, Scalar] = {"checkpoint": checkpoint, "ensemble": ensemble, "ensemble_decay": ensemble_decay}
    made |= {"rtc": rtc, "inference_steps": inference_steps, "tokenizer": tokenizer, "vlm": vlm}
    says = [family.describe(described.type, described.settings)]
    says += ["averages every step over the chunks that foresaw it"] * ensemble
    says += ["continues the chunk before it"] * rtc
    says += ["continues the chunk before it where that is asked for"] * (not rtc and not ensemble and joins)
    description = "; ".join(says)
    spec = SessionSpec(
        pipeline=name,
        observations=tuple(feature.spec() for feature in described.inputs),
        action=ArraySpec("action", "float32", (described.action_dim,)),
        horizon=horizon,
        execution_horizon=execution_horizon or executed(described.type, described.settings),
        control_hz=control_hz or described.control_hz or _CONTROL_HZ,
        ops=(Op.INFER,),
        prompt=family.prompt,
        description=description,
    )
    return Pipeline(
        name=name,
        spec=lambda: spec,
        stages=(StageDef("act", StageKind.ACT, "lerobot", made),),
        edges=(Edge(CLIENT, "observation", "act", "observation", PayloadKind.OBSERVATION),),
        plans={Op.INFER: Plan(answer=("act",), chunk="act.chunk")},
        description=description,
        options={"inference_delay": inference_delay} if rtc else {},
    )


def _problems(
    described: Described,
    horizon: int,
    control_hz: float,
    execution_horizon: int,
    ensemble: bool,
    rtc: bool,
    inference_delay: int,
) -> Iterator[str]:
    """What does not go together of the options."""
    if rtc and not family_of(described.type).rtc:
        yield f"LeRobot's {described.type} has no real-time chunking (option 'rtc')"
    if rtc and described.settings.get("use_relative_actions"):
        yield "chunks relative to a past state cannot be continued (option 'rtc')"
    if rtc and ensemble:
        yield "a chunk is either averaged ('ensemble') or continued ('rtc')"
    if not 0 <= inference_delay < horizon:
        yield f"inference_delay must be 0..{horizon - 1}"
    if not 0 <= execution_horizon <= horizon:
        yield f"execution_horizon must be 1..{horizon}, or 0 for the checkpoint's"
    if not 0 <= control_hz <= MOST_HZ:
        yield f"control_hz must be above 0 and at most {MOST_HZ:g}, or 0 for the checkpoint's"
