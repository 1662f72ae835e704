"""Deployments: how registered pipelines run. They cannot make an unregistered model work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from .endpoints import AccessConfig, Endpoints, is_loopback
from .errors import ConfigError, nearest
from .messages import Scalar
from .strict import Section as Section
from .strict import load as load
from .strict import location as location
from .strict import parse as parse
from .strict import shipped as shipped
from .strict import validate as validate
from .texts import NAME, Folder, check_text, short

Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, le=365 * 86_400, allow_inf_nan=False)]
# Upper bounds are what the consumer takes: gRPC's sizes are int32, torch's int64.
Int32 = Annotated[int, Field(ge=1, le=(1 << 31) - 1)]
Int64 = Annotated[int, Field(ge=1, le=(1 << 63) - 1)]
Some = Annotated[int, Field(ge=1, le=1 << 16)]  # of things each of which takes memory
_MIB = 1 << 20


class Listen(Section):
    """Where the gRPC server listens; ``port`` 0 takes any free one."""

    host: str = "127.0.0.1"
    port: Port = 50051


class RunnerConfig(Section):
    """One runner. ``stages`` are ``pipeline/stage`` names; ``*`` takes all that no other runner names."""

    name: str = Field(min_length=1)
    stages: tuple[str, ...] = ("*",)
    placement: Literal["thread", "process"] = "thread"
    threads: Annotated[int, Field(ge=1, le=1024)] = 1  # of torch inside this runner
    device: str = "cpu"
    connector: Literal["local", "shm"] | None = None  # None: shm for a process, local for a thread
    max_batch: Annotated[int, Field(ge=1, le=1024)] = 16  # sessions in one forward pass
    max_wait_ms: Annotated[float, Field(ge=0, le=1000)] = 0.0  # for others to join a batch; nobody waits when alone

    @model_validator(mode="after")
    def _connector_reaches(self) -> RunnerConfig:
        if self.placement == "process" and self.connector == "local":
            raise ValueError("the connector 'local' does not leave a process; take 'shm' for placement 'process'")
        return self


class Pools(Section):
    """Memory for KV blocks and typed state of all sessions: ``budget_bytes`` on each device, for all runners in threads
    together and for each runner in a process."""

    budget_bytes: Int64 = 1024 * _MIB
    blocks: Int32 | None = None  # of each KV pool; None: as many as max_sessions need, within the budget
    # Whose state may make room for others: of sessions whose log can rebuild it; of any idle one; of nobody.
    evict: Literal["recomputable", "any", "none"] = "recomputable"
    queue_ms: Annotated[float, Field(ge=0, le=60_000)] = 250.0  # a tick waits so long for room before it is refused


class Limits(Section):
    """What clients may ask for; defaults and meaning as in :class:`omni_loop.wire.limits.Limits`."""

    max_sessions: Some = 64
    max_message_bytes: Int32 = 32 * _MIB
    max_tensor_bytes: Int32 = 16 * _MIB
    max_tensors: Some = 64
    max_rank: Annotated[int, Field(ge=1, le=32)] = 8  # of numpy 1; 64 since
    max_image_pixels: Annotated[int, Field(ge=1, le=89_478_485)] = 4 * _MIB  # above it Pillow suspects a bomb
    max_prompt_bytes: Int32 = 4096


class SessionConfig(Section):
    """How long a silent session is kept, and how many ticks it may have waiting."""

    idle_ttl_s: Seconds = 600.0  # without a call
    grace_s: Seconds = 60.0  # after its stream was lost
    max_waiting: Some = 4
    replies: Annotated[int, Field(ge=1, le=1024)] = 8  # last answers kept for a client that attaches again
    max_in_flight: Annotated[int, Field(ge=1, le=1024)] = 4  # requests of a stream that may be unanswered
    outbox_bytes: Int64 = 8 * _MIB  # that may wait for a client that does not read
    rewind_ticks: Annotated[int, Field(ge=0, le=1024)] = 8  # states kept to go back to; the first to make room
    log_bytes: Annotated[int, Field(ge=0, le=(1 << 63) - 1)] = 8 * _MIB  # of requests, to rebuild evicted state from
    logs_bytes: Int64 = 1024 * _MIB  # of the logs of all sessions; the one that grows beyond it gives its own up


class SnapshotConfig(Section):
    """Where sessions are snapshotted to; without a ``folder`` there are no snapshots."""

    folder: Folder | None = None
    max_bytes: Int64 = 4096 * _MIB  # of all snapshots together
    # Sessions outlive the server: each is written when the server stops, and after so many ticks (0: not). A client
    # that attaches with its id and token to a server with the same folder goes on from there.
    on_stop: bool = False
    every_ticks: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _have_a_place(self) -> SnapshotConfig:
        if self.folder is None and (self.on_stop or self.every_ticks):
            raise ValueError("on_stop and every_ticks need a folder to write sessions to")
        return self


class RecordConfig(Section):
    """Where committed ticks are recorded; without a ``folder`` nothing is."""

    folder: Folder | None = None
    max_bytes: Int64 = 16_384 * _MIB  # of all recordings in the folder; what comes then is counted, not written
    keys: tuple[str, ...] | None = None  # observation keys to keep; None: all
    frames: bool = True  # whether predicted frames are kept
    # What may wait to be written, in memory; a tick beyond it is counted, not recorded.
    queue_bytes: Int64 = 256 * _MIB
    queue_events: Annotated[int, Field(ge=16, le=1 << 20)] = 8192
    part_ticks: Annotated[int, Field(ge=2, le=1 << 20)] = 4096  # of one session, after which what there is is sealed


class PipelineConfig(Section):
    """A pipeline that a template makes, served as ``name``. ``template`` is registered, or ``module:attribute`` of a
    module on the PYTHONPATH; ``options`` say of what it is made: a checkpoint, a frame size."""

    name: str
    template: str
    options: Mapping[str, Scalar] = Field(default_factory=dict)

    @field_validator("name")
    @classmethod
    def _travels(cls, name: str) -> str:
        if not NAME.fullmatch(name):
            rule = "1 to 100 ASCII letters, digits, dots, dashes and underscores, the first no dot"
            raise ValueError(f"{short(name)} is no name: {rule}")
        return name

    @field_validator("options")
    @classmethod
    def _are_texts(cls, options: Mapping[str, Scalar]) -> Mapping[str, Scalar]:
        for option, value in options.items():
            check_text(option, value)
        return options


# The tags keep errors to the form that was meant; see :func:`_problem`.
_Named = Annotated[
    Annotated[str, Tag("<name>")] | Annotated[PipelineConfig, Tag("<made>")],
    Discriminator(lambda value: "<made>" if isinstance(value, (Mapping, PipelineConfig)) else "<name>"),
]


class Deployment(Section):
    """How pipelines run: registered ones, by name, and those that templates make. ``stage_options`` are merged over the
    options a pipeline gives its stage factories."""

    pipelines: tuple[_Named, ...]
    listen: Listen = Listen()
    runners: tuple[RunnerConfig, ...] = (RunnerConfig(name="main"),)
    pools: Pools = Pools()
    limits: Limits = Limits()
    session: SessionConfig = SessionConfig()
    snapshots: SnapshotConfig = SnapshotConfig()
    record: RecordConfig = RecordConfig()
    access: AccessConfig = AccessConfig()
    endpoints: Endpoints = Endpoints()
    stage_options: Mapping[str, Mapping[str, Scalar]] = Field(default_factory=dict)
    # Connectors by "pipeline/source.output>target.input", or a pattern of it with "*"; else that of the runners.
    edges: Mapping[str, Literal["local", "shm"]] = Field(default_factory=dict)

    @field_validator("stage_options")
    @classmethod
    def _options_travel(cls, options: Mapping[str, Mapping[str, Scalar]]) -> Mapping[str, Mapping[str, Scalar]]:
        for factory, given in options.items():
            for name, value in given.items():
                check_text(f"{factory}.{name}", value)
                if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:  # to a runner's process
                    raise ValueError(f"{factory}.{name} does not fit 64 bits")
        return options

    @model_validator(mode="after")
    def _names_are_there_and_unique(self) -> Deployment:
        for what, given in (("pipeline", self.names), ("runner", [r.name for r in self.runners])):
            if not given:
                raise ValueError(f"{what}s: at least one must be named")
            if twice := sorted({name for name in given if list(given).count(name) > 1}):
                raise ValueError(f"{what} {twice[0]!r} is named twice")
        return self

    @model_validator(mode="after")
    def _public_binds_are_protected(self) -> Deployment:
        binds = {"listen": self.listen, "openpi": self.endpoints.openpi, "lerobot": self.endpoints.lerobot}
        for what, bind in binds.items():
            if bind is not None and not is_loopback(bind.host) and not self.access.protected:
                raise ValueError(
                    f"{what}: others can reach {bind.host!r}; give access.tokens or access.tls, or listen on 127.0.0.1"
                )
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """What its pipelines are called."""
        return tuple(p if isinstance(p, str) else p.name for p in self.pipelines)

    def place(self, stages: Iterable[str]) -> dict[str, str]:
        """Which runner has which stage: full stage name (``pipeline/stage``) to runner name.

        Raises:
            ConfigError: a runner names a stage that does not exist, two runners name the same, or none takes one.
        """
        todo = list(stages)
        placed: dict[str, str] = {}
        rest: str | None = None
        for runner in self.runners:
            for stage in runner.stages:
                if stage == "*":
                    if rest is not None:
                        raise ConfigError(f"runners {rest!r} and {runner.name!r} both take '*'")
                    rest = runner.name
                elif stage not in todo:
                    raise ConfigError(f"runner {runner.name!r}: no stage is called {stage!r}.{nearest(stage, todo)}")
                elif stage in placed:
                    raise ConfigError(f"stage {stage!r} is in runners {placed[stage]!r} and {runner.name!r}")
                else:
                    placed[stage] = runner.name
        for stage in todo:
            if stage not in placed:
                if rest is None:
                    raise ConfigError(f"no runner takes the stage {stage!r}; name it, or give one runner '*'")
                placed[stage] = rest
        return placed


def load_deployment(path_or_name: str | Path) -> Deployment:
    """A deployment from a YAML file, or a shipped one by name (``pusht``, ``demo``, ...)."""
    return load(Deployment, path_or_name, "serve")
