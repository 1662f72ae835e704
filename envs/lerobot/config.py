"""From a config name and its fields to LeRobot's own environment: what ``lerobot-eval --env.type=NAME`` builds."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import gymnasium

from omni_loop.errors import ConfigError, MissingExtra, OmniLoopError, UnknownName, Unsupported, nearest
from omni_loop.record.quiet import quiet
from omni_loop.registry import extra_of, missing_extra

from .. import headless

_REAL = "gym_manipulator"  # LeRobot's name for a robot that is there
_APART = "libero"  # what has an env of ours, in a Python environment of its own
_SEEN = ("pixels", "pixels_agent_pos")
#: Of ``obs_type``, by config name, where LeRobot lets any text pass or does not say which there are.
_OBS_TYPES = {
    "pusht": (*_SEEN, "state", "environment_state_agent_pos"),
    "aloha": _SEEN,
    "metaworld": _SEEN,
    "libero": _SEEN,
}


def configure(kind: str, fields: Mapping[str, Any], max_steps: int | None = None) -> Any:
    """LeRobot's ``EnvConfig`` called ``kind``, with ``fields`` of its own; those of installed plug-ins
    (``lerobot_env_*``) are found as LeRobot's commands find them.

    ``max_steps`` becomes its ``episode_length``, where it has one that ``fields`` does not name.

    Raises:
        MissingExtra: lerobot is not installed.
        UnknownName: no config of this name; the text names the nearest.
        ConfigError: a field it does not have, or a value that it does not take.
        Unsupported: it is code from a hub, or a robot that is there.
    """
    try:
        with quiet():
            from lerobot.envs.configs import EnvConfig, HubEnvConfig
    except ModuleNotFoundError as e:
        raise missing_extra(e, "env 'lerobot' ") from e
    found = _choice(EnvConfig, kind)
    if issubclass(found, HubEnvConfig):
        raise Unsupported(f"LeRobot's env {kind!r} is code that is downloaded from a hub; it is not run here")
    if kind == _REAL:
        raise Unsupported(f"LeRobot's env {kind!r} is a robot, not a simulator")
    known = [field.name for field in dataclasses.fields(found) if field.init]
    for name in fields:
        if name not in known:
            raise ConfigError(f"LeRobot's env {kind!r} has no field {name!r}.{nearest(name, known)}")
    shown, types = fields.get("obs_type"), _OBS_TYPES.get(kind)
    if types is not None and shown is not None and shown not in types:
        raise ConfigError(f"LeRobot's env {kind!r} has no obs_type {shown!r:.64}.{nearest(str(shown), types)}")
    given = dict(fields)
    if max_steps is not None and "episode_length" in known:
        given.setdefault("episode_length", max_steps)
    import draccus  # a package of LeRobot's: it is there where that is

    try:
        return draccus.decode(EnvConfig, {"type": kind, **given})
    except Exception as e:  # of draccus' parsers, and what a config's own checks raise
        raise ConfigError(f"LeRobot's env {kind!r}: {str(e).splitlines()[0] if str(e) else type(e).__name__}") from e


def _choice(configs: Any, kind: str) -> Any:
    if kind not in configs.get_known_choices():
        from lerobot.utils.import_utils import register_third_party_plugins

        register_third_party_plugins()
    known = configs.get_known_choices()
    if kind not in known:
        raise UnknownName(f"LeRobot has no env {kind!r}.{nearest(kind, known)}")
    return configs.get_choice_class(kind)


@dataclasses.dataclass(frozen=True, slots=True)
class Built:
    """``env`` is one environment as LeRobot makes it, inside ``vector``, which is kept to close it: its own
    destructor would. ``preprocess``: what LeRobot does to this env's observations before a policy sees them; None:
    nothing. ``postprocess``: to actions."""

    env: gymnasium.Env[Any, Any]
    vector: Any
    preprocess: Any = None
    postprocess: Any = None


def build(config: Any, task_id: int | None = None) -> Built:
    """The environment of ``config``. ``task_id`` says which, where a config makes one for each of several tasks.

    Raises:
        MissingExtra: the simulator is not installed.
        ConfigError: there are several tasks and none, or one that is not there, was named; or LeRobot cannot make it.
    """
    from lerobot.envs.factory import make_env

    headless.prepare()  # before a simulator imports mujoco
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):  # it says what it makes, task by task
            made = make_env(config, n_envs=1, use_async_envs=False)
    except ModuleNotFoundError as e:
        raise _missing(config.type, e) from e
    except OmniLoopError:  # of a plug-in that knows this project
        raise
    except Exception as e:  # also of the simulator's own code
        raise _refused(config, e) from e
    try:
        return _chosen(config, made, task_id)
    except BaseException:
        _close(made)
        raise


def _missing(kind: str, error: ModuleNotFoundError) -> MissingExtra:
    """Names this project's extra for the simulator, else LeRobot's own."""
    cause = error if error.name or not isinstance(error.__cause__, ModuleNotFoundError) else error.__cause__
    missing = missing_extra(cause, f"LeRobot's env {kind!r} ")
    package = (cause.name or "").partition(".")[0]
    extras = metadata.metadata("lerobot").get_all("Provides-Extra") or ()
    if extra_of(package) is not None or kind not in extras:
        return missing
    apart = f", or say env: {_APART} (omni-loop envs install {_APART})" if kind == _APART else ""
    return MissingExtra(missing.text.replace(f"install {package}", f"install lerobot[{kind}]{apart}"))


def _refused(config: Any, error: Exception) -> ConfigError:
    """``error`` of making the env, with the nearest name where it is that of a task."""
    if config.type == "metaworld" and isinstance(error, KeyError):
        from lerobot.envs.metaworld import DIFFICULTY_TO_TASKS, TASK_DESCRIPTIONS

        task = str(error.args[0])
        known = nearest(task, {*DIFFICULTY_TO_TASKS, *TASK_DESCRIPTIONS})
        return ConfigError(f"LeRobot's env 'metaworld' has no task {task!r:.64}.{known}")
    tasks = [id_.partition("/")[2] for id_ in gymnasium.registry if id_.startswith(f"{config.package_name}/")]
    if isinstance(error, gymnasium.error.NameNotFound) and tasks:
        return ConfigError(
            f"LeRobot's env {config.type!r} has no task {config.task!r:.64}.{nearest(str(config.task), tasks)}"
        )
    kind = "" if isinstance(error, (ValueError, gymnasium.error.Error)) else f"{type(error).__name__}: "
    return ConfigError(f"LeRobot's env {config.type!r}: {kind}{error}")


def _chosen(config: Any, made: Mapping[str, Mapping[int, Any]], task_id: int | None) -> Built:
    vectors = {task: vector for group in made.values() for task, vector in group.items()}
    if sum(len(group) for group in made.values()) > 1 and task_id is None:
        tasks = ", ".join(f"{suite}: {len(group)} tasks" for suite, group in made.items())
        raise ConfigError(f"LeRobot's env {config.type!r} makes {tasks}; name one: task_id")
    chosen = task_id if task_id is not None else next(iter(vectors))
    if chosen not in vectors:
        raise ConfigError(f"LeRobot's env {config.type!r} has no task_id {chosen}; it has 0 to {max(vectors)}")
    kept = vectors[chosen]
    before, after = config.get_env_processors()
    _close(made, kept)
    return Built(kept.envs[0], kept, before if before.steps else None, after if after.steps else None)


def _close(made: Mapping[str, Mapping[int, Any]], kept: Any = None) -> None:
    for group in made.values():
        for vector in group.values():
            if vector is not kept:
                vector.close()
