"""An environment of gymnasium that a suite describes, as an env of this project."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from omni_loop.env import EnvStep
from omni_loop.errors import ConfigError, MissingExtra, OmniLoopError, UnknownName, nearest
from omni_loop.registry import extra_of, missing_extra
from omni_loop.strict import validate
from omni_loop.types import ArraySpec

from .. import headless
from ..drawable import drawable
from ..gymnasium_adapter import RENDER, GymnasiumEnv, Key, read, rendered
from .spec import Action, GymnasiumOptions, Observation


class Generic(GymnasiumEnv):
    """The environment is made, reset and stepped once, so that whatever does not fit is said when it is opened, not in
    every episode: a missing success key, source or module, shapes, bounds.

    Raises:
        ConfigError: the options do not validate, or say what the environment does not have; names the nearest.
        UnknownName: nobody registered the id.
        MissingExtra: a module to import, or OpenGL for what is rendered, is not installed.
    """

    def __init__(self, max_steps: int, **options: Any) -> None:
        said = validate(GymnasiumOptions, options, "env_options of 'gymnasium'")
        env = make(said, max_steps)
        try:
            self._to_env: Rescale | None
            action, self._to_env = action_of(said.id, said.action, env.action_space)
            self._held = said.action.hold
            self.packages = tuple(module.partition(".")[0] for module in said.imports)
            super().__init__(
                env,
                name=said.id,
                observations=_probe(said, env),
                success_key=said.success,
                max_steps=max_steps,
                control_hz=said.control_hz,
                action=action,
                info_keys=said.info_keys,
                score=said.score,
            )
            self.reset(0, keys=[name for name, wanted in said.observations.items() if not wanted.render])
            self.step(self.hold(), keys=())  # says which of success, info and score is missing
        except BaseException as e:
            env.close()
            if isinstance(e, Exception) and not isinstance(e, OmniLoopError):  # of the environment's own code
                raise ConfigError(f"env {said.id!r} broke when it was tried: {type(e).__name__}: {e}") from e
            raise
        self._phase = "fresh"

    def hold(self) -> NDArray[np.float32]:
        """What the suite calls holding, else zero (:class:`.spec.Action`)."""
        said = self._held
        if said is None:
            return super().hold()
        held = np.asarray(read(self.name, self._observation, said) if isinstance(said, str) else said, np.float64)
        if held.shape not in ((), self.action.shape):
            shapes = f"{list(held.shape)}, an action {list(self.action.shape)}"
            raise ConfigError(f"env {self.name!r}: hold has the shape {shapes}")
        held = np.broadcast_to(held, self.action.shape)
        if isinstance(said, str):  # a place may lie beyond what an action reaches
            held = np.clip(held if self._to_env is None else self._to_env.back(held), self.action.low, self.action.high)
        return held.astype(np.float32)

    def _render(self) -> NDArray[np.uint8]:
        see_that_it_draws(self._env)
        return super()._render()

    def _step(self, action: NDArray[np.float32]) -> EnvStep:
        return super()._step(action if self._to_env is None else self._to_env(action))


class Rescale:
    """Actions within ``low``..``high`` to those of a Box, each dimension by itself."""

    def __init__(self, low: float, high: float, box: gymnasium.spaces.Box) -> None:
        self._low, self._high, self._box = low, high, box

    def __call__(self, action: NDArray[np.float32]) -> NDArray[Any]:
        share = (np.asarray(action, np.float64) - self._low) / (self._high - self._low)
        low, high = np.asarray(self._box.low, np.float64), np.asarray(self._box.high, np.float64)
        return np.clip(low + share * (high - low), low, high).astype(self._box.dtype)

    def back(self, place: NDArray[np.float64]) -> NDArray[np.float64]:
        """The action that becomes ``place``."""
        low, high = np.asarray(self._box.low, np.float64), np.asarray(self._box.high, np.float64)
        span = np.where(high > low, high - low, 1.0)
        there: NDArray[np.float64] = self._low + (place - low) / span * (self._high - self._low)
        return there


def make(said: GymnasiumOptions, max_steps: int) -> gymnasium.Env[Any, Any]:
    """The environment of ``said.id``, which ends after ``max_steps`` whatever it was registered with."""
    headless.prepare()
    for module in said.imports:
        try:
            import_module(module)
        except ModuleNotFoundError as e:
            if extra_of(missing := (e.name or module).partition(".")[0]) is None:
                where = "not installed, or its folder is not on the PYTHONPATH"
                raise MissingExtra(f"env {said.id!r} needs the module {missing!r}, which is not there: {where}") from e
            raise missing_extra(e, f"env {said.id!r} ") from e
    kwargs = dict(said.kwargs) | ({} if said.render_mode is None else {"render_mode": said.render_mode})
    try:
        env: gymnasium.Env[Any, Any] = gymnasium.make(
            said.id, max_episode_steps=max_steps, disable_env_checker=True, **kwargs
        )
    except gymnasium.error.UnregisteredEnv:
        how = "" if said.imports else " If a module registers it, name that as import."
        raise UnknownName(f"gymnasium has no env {said.id!r}.{_near_id(said.id)}{how}") from None
    except ModuleNotFoundError as e:
        if not e.name:  # gymnasium's own, about the module before the colon of an id
            raise ConfigError(f"env {said.id!r}: {e}") from e
        raise missing_extra(e, f"env {said.id!r} ") from e
    except Exception as e:  # also of the environment's own code
        raise ConfigError(f"env {said.id!r} cannot be made with {kwargs}: {type(e).__name__}: {e}") from e
    if said.fast_rendering and (model := _model(env)) is not None:
        headless.draw_fast(model)
    return env


def _model(env: gymnasium.Env[Any, Any]) -> Any:
    """MuJoCo's model of ``env``; None: it has none."""
    model = getattr(env.unwrapped, "model", None)
    return model if type(model).__name__ == "MjModel" else None


def see_that_it_draws(env: gymnasium.Env[Any, Any]) -> None:
    """MissingExtra: ``env`` would draw with MuJoCo, which cannot on this machine."""
    if _model(env) is not None:
        drawable()


def _near_id(wanted: str) -> str:
    """The nearest id in the same namespace, where it has one: there are hundreds."""
    space, _, _ = wanted.rpartition("/")
    known = [id_ for id_ in gymnasium.registry if id_.rpartition("/")[0] == space] or list(gymnasium.registry)
    hint = nearest(wanted, known)
    return hint if "Did you mean" in hint else ""


def action_of(name: str, said: Action, space: gymnasium.Space[Any]) -> tuple[ArraySpec, Rescale | None]:
    """The spec of actions as a policy gives them, and how they become the environment's (None: as they are)."""
    if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1:
        raise ConfigError(f"env {name!r}: actions must be a one-dimensional Box, not {space}")
    if not np.issubdtype(space.dtype, np.floating):
        raise ConfigError(f"env {name!r}: actions must be real numbers, not {space.dtype}")
    lows, highs = np.unique(space.low), np.unique(space.high)
    finite = bool(np.isfinite([*lows, *highs]).all())
    if said.low is not None and said.high is not None:
        low, high = said.low, said.high
    elif not finite:
        raise ConfigError(f"env {name!r}: its actions have no bounds; name low and high under action")
    else:
        low, high = (float(lows[0]), float(highs[0])) if len(lows) == len(highs) == 1 else (-1.0, 1.0)
    spec = ArraySpec("action", "float32", space.shape, unit=said.unit, low=low, high=high, description=said.description)
    own = len(lows) == len(highs) == 1 and (float(lows[0]), float(highs[0])) == (low, high)
    return spec, None if own or not finite or not said.rescale else Rescale(low, high, space)


def _probe(said: GymnasiumOptions, env: gymnasium.Env[Any, Any]) -> tuple[Key, ...]:
    """Every array's spec, from what the environment really gives: declared spaces are wrong too often."""
    observed, _ = env.reset(seed=0)
    return tuple(_key(said.id, name, wanted, env, observed) for name, wanted in said.observations.items())


def _key(name: str, key: str, wanted: Observation, env: gymnasium.Env[Any, Any], observed: Any) -> Key:
    sources: str | tuple[str, ...] = RENDER
    if not wanted.render:
        own = key if isinstance(observed, dict) else ""
        sources = own if wanted.source is None else wanted.source
    if wanted.render and wanted.shape is not None:
        shape, dtype = wanted.shape, "uint8"
    else:
        if wanted.render:
            see_that_it_draws(env)
        value = rendered(name, env) if wanted.render else read(name, observed, sources)
        shape, dtype = value.shape, str(value.dtype)
        if value.dtype.kind not in "biuf":
            raise ConfigError(f"env {name!r}: {key!r} holds no numbers but {dtype}")
    low, high = (0.0, 255.0) if dtype == "uint8" else (None, None)
    spec = ArraySpec(
        key, wanted.dtype or ("float32" if dtype == "float64" else dtype), wanted.shape or shape, wanted.unit,
        low if wanted.low is None else wanted.low, high if wanted.high is None else wanted.high,
        description=wanted.description,
    )  # fmt: skip
    return Key(spec, sources)
