"""Configuration that is read strictly: YAML in which nothing wins in silence, validated without coercion.

An unknown key is an error that names it and the nearest known one.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import ConfigError, UnknownName, nearest
from .texts import short

M = TypeVar("M", bound=BaseModel)
# Of one YAML file; far above any real one.
MAX_TEXT = 1 << 18  # characters
MAX_NODES = 10_000  # values and keys, where an alias counts as all that it stands for


class Section(BaseModel):
    """Base of everything read from YAML: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


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
        raise UnknownName(f"no shipped {what} is called {short(given)}.{hint}")
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
