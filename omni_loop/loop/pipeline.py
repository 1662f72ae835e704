"""The graph of a pipeline: stages, typed edges, what is final, what feeds the next tick.

A pipeline is registered in Python beside its model. It says what exists; a deployment (YAML) says how it
runs. Cycles go over ticks only: a *feedback* edge hands an output of this tick to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .. import registry
from ..config import PipelineConfig
from ..connect.schema import Schema
from ..errors import ConfigError
from ..messages import Scalar
from ..types import Op, SessionSpec, StageKind

CLIENT = "client"  # the source of edges that carry what the client sent


@dataclass(frozen=True, slots=True)
class StageDef:
    """A stage of a pipeline; ``factory`` builds it inside the runner (``module:function`` in the
    registry), called with ``options`` and the deployment's stage options merged over them."""

    name: str
    kind: StageKind
    factory: str
    options: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Edge:
    """``source.output`` becomes ``target.input``. From :data:`CLIENT` the outputs are ``observation``
    (arrays by name, plus ``executed``), ``actions`` (``float32[n, action_dim]`` of a Predict) and ``goal`` of a Plan
    (arrays ``goal uint8[h, w, 3]`` and ``init float32[horizon, action_dim]``, each only when it was sent).

    ``kind`` says what payloads hold, see :mod:`~omni_loop.connect.schema`; ``schema`` narrows it, or is all there is of
    a kind of one's own. With ``streams`` the target also runs on parts of the output, while the source still makes the
    rest, when a client asks for previews: it has no state, and needs no other input."""

    source: str
    output: str
    target: str
    input: str
    kind: str
    feedback: bool = False  # the payload of tick t is an input of tick t + 1
    optional: bool = False  # the stage also runs without it
    streams: bool = False
    schema: Schema | None = None

    @property
    def name(self) -> str:
        return f"{self.source}.{self.output}>{self.target}.{self.input}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The tick of one operation.

    ``answer`` stages form the transaction: they commit together, and the answer leaves then. ``besides``
    stages run after them for what was asked besides (frames of the chunk); their failure loses only that.
    The plan of ``Op.PLAN`` commits nothing. Its stages get ``horizon``, ``candidates``, ``iterations``, ``method`` and
    ``budget_ms`` as parameters; its chunk's payload (``actions float32[horizon, action_dim]``) says how it was found
    in its meta, as the fields of :class:`~omni_loop.types.PlanSummary`.
    """

    answer: tuple[str, ...]
    besides: tuple[str, ...] = ()
    chunk: str | None = None  # "stage.output" that is the action chunk (kind actions, array "actions")
    frames: str | None = None  # "stage.output" with arrays "frames" uint8[n,h,w,3] and maybe "scene"
    progress: str | None = None  # "stage.output" with arrays "progress" and "done", float scalars


@dataclass(frozen=True, slots=True)
class Pipeline:
    """See the module's text. ``spec`` is called once at start, when checkpoints may be read."""

    name: str
    spec: Callable[[], SessionSpec]
    stages: tuple[StageDef, ...]
    edges: tuple[Edge, ...]
    plans: Mapping[Op, Plan]
    description: str = ""
    options: Mapping[str, Scalar] = field(default_factory=dict)  # what a client may choose at OpenSession, with
    # its default; a session's choice reaches every stage in ``params``

    def stage(self, name: str) -> StageDef:
        return next(s for s in self.stages if s.name == name)

    def inputs_of(self, stage: str) -> tuple[Edge, ...]:
        return tuple(e for e in self.edges if e.target == stage)

    def outputs_of(self, stage: str) -> tuple[Edge, ...]:
        return tuple(e for e in self.edges if e.source == stage)


def load_pipeline(named: str | PipelineConfig) -> Pipeline:
    """A registered pipeline by name, or the one that a template makes.

    Raises:
        UnknownName, MissingExtra: as :func:`omni_loop.registry.load`.
        ConfigError: registered as something else, or an option the template does not take.
        CheckpointError: the template reads a checkpoint that is not there.
    """
    if isinstance(named, str):
        name, pipeline = named, registry.load(registry.PIPELINES, named)
    else:
        name = named.name
        pipeline = registry.build(registry.TEMPLATES, named.template, {"name": name, **named.options})
    if not isinstance(pipeline, Pipeline):
        raise ConfigError(f"pipeline {name!r} is registered as {type(pipeline).__name__}, expected Pipeline")
    if pipeline.name != name:
        raise ConfigError(f"pipeline {name!r} calls itself {pipeline.name!r}; a template takes the name it is given")
    return pipeline
