"""Deployments and every other YAML file of this project: strict models, errors that name the nearest key.

A deployment says how registered pipelines run. It cannot make an unregistered model work.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from .errors import ConfigError, UnknownName, nearest
from .messages import Scalar

M = TypeVar("M", bound=BaseModel)
Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, le=365 * 86_400, allow_inf_nan=False)]
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_MAX_PATH = 4000  # bytes, somewhat below what systems take
_MAX_OPTION = 1 << 14  # characters: a negative prompt is long
# Upper bounds are what the consumer takes: gRPC's sizes are int32, torch's int64.
Int32 = Annotated[int, Field(ge=1, le=(1 << 31) - 1)]
Int64 = Annotated[int, Field(ge=1, le=(1 << 63) - 1)]
Some = Annotated[int, Field(ge=1, le=1 << 16)]  # of things each of which takes memory
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_MIB = 1 << 20
# Of one YAML file; far above any real one.
MAX_TEXT = 1 << 18  # characters
MAX_NODES = 10_000  # values and keys, where an alias counts as all that it stands for


def _short(text: str) -> str:
    """``text`` as a message shows it."""
    return repr(text if len(text) <= 100 else f"{text[:100]}...")


def _check_text(option: str, value: Scalar) -> None:
    if isinstance(value, str) and ("\0" in value or len(value) > _MAX_OPTION):
        what = "holds the character NUL" if "\0" in value else f"has {len(value)} characters; at most {_MAX_OPTION}"
        raise ValueError(f"{option} {what}")


def _folder(path: str) -> str:
    if not path or "\0" in path or len(path.encode()) > _MAX_PATH:
        raise ValueError(f"{_short(path)} is no path of a folder")
    if path.startswith("~"):
        raise ValueError(f"{_short(path)}: '~' is not expanded here; write the whole path")
    return path


Folder = Annotated[str, AfterValidator(_folder)]


class Section(BaseModel):
    """Base of everything read from YAML: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Listen(Section):
    """Where the gRPC server listens; ``port`` 0 takes any free one."""

    host: str = "127.0.0.1"
    port: Port = 50051

    @field_validator("host")
    @classmethod
    def _loopback_only(cls, host: str) -> str:
        # Anything else needs a token or TLS, which this version does not have yet.
        if host not in _LOOPBACK:
            raise ValueError(f"{host!r} is not a loopback address; this version serves {', '.join(_LOOPBACK)} only")
        return host


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

    idle_ttl_s: Seconds = 600.0
    max_waiting: Some = 4
    rewind_ticks: Annotated[int, Field(ge=0, le=1024)] = 8  # states kept to go back to; the first to make room
    log_bytes: Annotated[int, Field(ge=0, le=(1 << 63) - 1)] = 8 * _MIB  # of requests, to rebuild evicted state from


class SnapshotConfig(Section):
    """Where sessions are snapshotted to; without a ``folder`` there are no snapshots."""

    folder: Folder | None = None
    max_bytes: Int64 = 4096 * _MIB  # of all snapshots together


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
        if not _NAME.fullmatch(name):
            rule = "1 to 100 ASCII letters, digits, dots, dashes and underscores, the first no dot"
            raise ValueError(f"{_short(name)} is no name: {rule}")
        return name

    @field_validator("options")
    @classmethod
    def _are_texts(cls, options: Mapping[str, Scalar]) -> Mapping[str, Scalar]:
        for option, value in options.items():
            _check_text(option, value)
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
    stage_options: Mapping[str, Mapping[str, Scalar]] = Field(default_factory=dict)
    # Connectors by "pipeline/source.output>target.input", or a pattern of it with "*"; else that of the runners.
    edges: Mapping[str, Literal["local", "shm"]] = Field(default_factory=dict)

    @field_validator("stage_options")
    @classmethod
    def _options_travel(cls, options: Mapping[str, Mapping[str, Scalar]]) -> Mapping[str, Mapping[str, Scalar]]:
        for factory, given in options.items():
            for name, value in given.items():
                _check_text(f"{factory}.{name}", value)
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


def load(kind: type[M], path_or_name: str | Path, folder: str) -> M:
    """Read and validate a YAML file of ``kind``: a path, or the name of one shipped in ``configs/<folder>``.

    Raises:
        UnknownName: no such shipped name.
        ConfigError: no such file, no YAML, or it does not validate.
    """
    given = str(path_or_name)
    if isinstance(path_or_name, Path) or "/" in given or given.endswith((".yaml", ".yml")):
        try:
            text = Path(given).read_text(encoding="utf-8")
        except (OSError, ValueError) as e:  # ValueError: not UTF-8, or a path with NUL
            raise ConfigError(f"cannot read {given}: {getattr(e, 'strerror', None) or 'not UTF-8'}") from None
        return validate(kind, parse(text, given), given)
    if given not in shipped(folder):
        what = {"serve": "deployment", "eval": "suite", "train": "recipe"}.get(folder, folder)
        beside = next((f"{given}{end}" for end in (".yaml", ".yml") if _is_file(f"{given}{end}")), "")
        hint = f" There is a file of that name: say {beside}" if beside else nearest(given, shipped(folder))
        raise UnknownName(f"no shipped {what} is called {_short(given)}.{hint}")
    text = (resources.files("omni_loop_configs") / folder / f"{given}.yaml").read_text(encoding="utf-8")
    return validate(kind, parse(text, given), given)


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except OSError:  # a name longer than any file's
        return False


def shipped(folder: str) -> list[str]:
    """Names of the files shipped in ``configs/<folder>``."""
    root = resources.files("omni_loop_configs") / folder
    if not root.is_dir():
        return []
    return sorted(f.name.removesuffix(".yaml") for f in root.iterdir() if f.name.endswith(".yaml"))


class _Loader(yaml.SafeLoader):
    """YAML lets a second key of the same name win in silence, and aliases of aliases grow without bound; here both are
    errors."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = 0
        self._sizes: dict[yaml.Node, int] = {}  # of every finished node, with all that is in it

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        before, alias = self._nodes, self.check_event(yaml.AliasEvent)
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        self._nodes += not alias
        self._check_size(mark)
        node = super().compose_node(parent, index)
        assert node is not None  # of the end of a document, which is no event of a node
        if alias:
            if node not in self._sizes:
                raise yaml.composer.ComposerError(None, None, "an alias stands within what it stands for", mark)
            self._nodes += self._sizes[node]
            self._check_size(mark)
        else:
            self._sizes[node] = self._nodes - before
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                break  # refused below
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def _check_size(self, mark: yaml.Mark) -> None:
        if self._nodes > MAX_NODES:
            text = f"more than {MAX_NODES} values, where an alias counts as all that it stands for"
            raise yaml.composer.ComposerError(None, None, text, mark)


def parse(text: str, source: str) -> dict[str, Any]:
    """YAML text to a mapping. Raises :class:`ConfigError`, also for more than any such file has to say."""
    if len(text) > MAX_TEXT:
        raise ConfigError(f"{source}: {len(text)} characters; at most {MAX_TEXT} are read")
    try:
        data = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as e:
        line = f" (line {e.problem_mark.line + 1})" if e.problem_mark else ""
        raise ConfigError(f"{source}: {e.problem}{line}") from None
    except (yaml.YAMLError, ValueError) as e:  # ValueError: a date that does not exist, a number too long
        raise ConfigError(f"{source}: not YAML: {e}") from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply") from None
    if data is None:
        raise ConfigError(f"{source}: is empty")
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: wanted keys and values, not {type(data).__name__}")
    return data


def validate(kind: type[M], data: Mapping[str, Any], source: str) -> M:
    """``data`` as ``kind``, without coercion ("2" is no number). The error names the key and the nearest known."""
    try:
        # Through JSON, where strict mode still takes a list for a tuple and a string for an enum.
        return kind.model_validate_json(json.dumps(data), strict=True)
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply") from None
    except (TypeError, ValueError) as e:
        if not isinstance(e, ValidationError):
            raise ConfigError(f"{source}: {_foreign(data) if isinstance(e, TypeError) else e}") from None
        # A value that fits none of a union's types is reported once per type: keep one.
        problems = dict.fromkeys(_problem(kind, error["type"], error["loc"], error["msg"]) for error in e.errors())
        raise ConfigError(f"{source}: {'; '.join(problems)}") from None


def location(loc: Iterable[int | str]) -> str:
    """Where a value stands, as one would write it: ``runners[0].name``; empty for the whole."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")


def _foreign(value: Any, loc: tuple[int | str, ...] = ()) -> str:
    """What of ``value`` is of a type that JSON does not know and YAML does, such as a date; empty: nothing."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif not isinstance(value, (str, int, float, bool, type(None))):
        return f"{location(loc)}: wanted text, a number, true/false, a list or keys, not a {type(value).__name__}"
    for key, inner in items:
        if not isinstance(key, (str, int, float, bool, type(None))):
            where = location(loc)
            return f"{where}{': ' if where else ''}the key {str(key)!r} is a {type(key).__name__}; wanted text"
        if found := _foreign(inner, (*loc, key if isinstance(key, int) else str(key))):
            return found
    return ""


_SCALARS = ("str", "int", "float", "bool")  # how pydantic names the members of a Scalar in a location


def _problem(kind: type[BaseModel], error: str, loc: tuple[int | str, ...], message: str) -> str:
    loc = tuple(part for part in loc if part not in ("<name>", "<made>"))
    if len(loc) > 1 and loc[-1] in _SCALARS:
        loc, message = loc[:-1], "wanted text, a number or true/false"
    where = location(loc)
    if error == "extra_forbidden":
        return f"unknown key {where!r}.{nearest(str(loc[-1]), _fields(kind, loc[:-1]))}"
    text = message.removeprefix("Value error, ")
    return f"{where}: {text}" if where else text


def _fields(kind: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Keys known where ``loc`` leads, starting from ``kind``."""
    for part in loc:
        if isinstance(part, str) and part in kind.model_fields:
            kind = _model_in(kind.model_fields[part].annotation) or kind
    return [f.alias or name for name, f in kind.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _model_in(arg))), None)
