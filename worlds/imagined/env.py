"""The registered env ``imagined``: whatever evaluates in a simulator also runs in imagination.

An episode begins with the first real observation of another registered env under the seed; from there the world model
says what each action leads to. The policy sees predicted frames, and the agent where the readout sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from omni_loop import registry
from omni_loop.env import BaseEnv, Env, EnvStep
from omni_loop.errors import ConfigError, UnknownName, nearest
from omni_loop.types import Array, ArraySpec

from .judge import Coverage, Judge, Progress, indifferent
from .served import ServedWorld, frame_key
from .single import ImaginedEnv
from .start import Start

_RENDER_WIDTH = 384  # px, for people; a multiple of 16, as video wants
_JUDGES: dict[str, Callable[[], Judge]] = {"coverage": Coverage, "progress": Progress, "none": lambda: indifferent}


def _judge(name: str) -> Judge:
    if name in _JUDGES:
        return _JUDGES[name]()
    module, _, attribute = name.partition(":")
    if not attribute:
        raise UnknownName(f"no judge of imagined frames is called {name!r}.{nearest(name, _JUDGES)}")
    try:
        found: Judge = getattr(import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError) as e:
        raise ConfigError(f"judge {name!r}: {e}") from None
    return found


class Imagined(BaseEnv):
    """``world`` is the pipeline, served by ``address``, or by a server of ``deployment`` (a shipped name or file) that
    is started at the first reset and ends with the last env that uses it. ``start`` is the env that gives first
    observations, its action and its control rate: ``image`` is its key of the frames, ``agent`` that of the agent's
    position ``float32[2, 2]`` a step ago and now, which the scene's first point continues (empty: none is given).
    ``judge``: coverage, progress, none, or ``module:attribute`` of one's own; the env's score is its ``score``.
    """

    name = "imagined"

    def __init__(
        self,
        max_steps: int = 300,
        world: str = "pusht-world",
        deployment: str = "pusht-world",
        address: str = "",
        start: str = "pusht",
        image: str = "image",
        agent: str = "agent_pos",
        judge: str = "coverage",
    ) -> None:
        """Raises UnknownName for a start, key, judge or deployment that is not there; ConfigError for an agent of
        another shape. That the server has the pipeline is seen at the first reset."""
        super().__init__(max_steps)
        self._judge = _judge(judge)
        self.score = getattr(self._judge, "score", None)
        self._served = ServedWorld(address or deployment, world)
        self._start: Env = registry.build(registry.ENVS, start, {})
        self._image, self._agent_key = image, agent
        self.observations = tuple(self._given(key) for key in (image, agent) if key)
        if agent and (self.observations[1].shape, self.observations[1].dtype) != ((2, 2), "float32"):
            raise ConfigError(f"env {start!r}: {agent!r} is no position a step ago and now, float32[2, 2]")
        self.action, self.control_hz = self._start.action, self._start.control_hz
        self._env: ImaginedEnv | None = None
        self._first: dict[str, Array] = {}
        self._agent: Array = np.zeros((2, 2), np.float32)

    @property
    def versions(self) -> Mapping[str, str]:
        """Of what gives the first observation; the world model is none of the packages."""
        return getattr(self._start, "versions", {})

    def _given(self, key: str) -> ArraySpec:
        known = {spec.name: spec for spec in self._start.observations}
        if key not in known:
            self._start.close()
            raise UnknownName(f"env {self._start.name!r} has no observation {key!r}.{nearest(key, known)}")
        return known[key]

    def _reset(self, seed: int) -> None:
        if self._env is None:
            self._env = self._made()
        self._env.reset(seed=seed)
        if self._agent_key:
            self._agent = self._first[self._agent_key]

    def _made(self) -> ImaginedEnv:
        self._served.hold()
        try:
            spec, image = self._served.spec, self.observations[0]
            if spec.action.shape != self.action.shape:
                raise ConfigError(
                    f"pipeline {spec.pipeline!r} takes actions {list(spec.action.shape)}, "
                    f"env {self._start.name!r} has {list(self.action.shape)}"
                )
            if spec.frame is None or (spec.frame.shape, spec.frame.dtype) != (image.shape, image.dtype):
                raise ConfigError(
                    f"pipeline {spec.pipeline!r} predicts {spec.frame and list(spec.frame.shape)}, "
                    f"env {self._start.name!r} shows {image.name} as {list(image.shape)}"
                )
            return ImaginedEnv(self._served, self._begin, judge=self._judge, max_steps=self.max_steps)
        finally:
            self._served.release()

    def _begin(self, seed: int) -> Start:
        """The first real observation, by the names of the pipeline."""
        spec = self._served.spec
        names = {a.name: a.name for a in spec.observations if not a.optional} | {frame_key(spec): self._image}
        wanted = {*names.values(), *([self._agent_key] if self._agent_key else [])}
        self._first = self._start.reset(seed, wanted)
        return Start({key: self._first[name][None] for key, name in names.items()})

    def _step(self, action: NDArray[np.float32]) -> EnvStep:
        assert self._env is not None  # a step comes after a reset
        _, reward, success, _, info = self._env.step(action)
        if self._agent_key:
            if "scene" not in info:
                raise ConfigError(f"pipeline {self._served.pipeline!r} reads no scene: set agent to ''")
            spec = self.observations[1]
            now = np.clip(info["scene"][0], spec.low, spec.high, dtype=np.float32)
            self._agent = np.stack([self._agent[1], now])
        kept = {key: value for key, value in info.items() if isinstance(value, float)}
        return EnvStep({}, reward, success, False, success, kept)

    def _array(self, key: str) -> Array:
        assert self._env is not None
        return self._env.present.frame.copy() if key == self._image else self._agent.copy()

    def _render(self) -> NDArray[np.uint8]:
        assert self._env is not None
        image = Image.fromarray(self._env.present.frame)
        size = (_RENDER_WIDTH, round(image.height * _RENDER_WIDTH / image.width / 2) * 2)
        return np.asarray(image.resize(size, Image.Resampling.BICUBIC))

    def _close(self) -> None:
        try:
            if self._env is not None:
                self._env.close()
        finally:
            self._start.close()
