"""Any env that this project has registered, in a worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .adapter import Outcome, Spec
from .wire import Array


class Project:
    """The env called ``env``, made with ``options``. Needs ``omni_loop`` in the worker's environment.
    An instruction that is another in every episode does not travel: it would be that of none."""

    def __init__(self, env: str, options: Mapping[str, Any]) -> None:
        from dataclasses import asdict

        from omni_loop import registry

        made = self._env = registry.build(registry.ENVS, env, options)
        self.spec = Spec(
            made.name,
            [asdict(spec) for spec in made.observations],
            asdict(made.action),
            made.control_hz,
            made.max_steps,
            made.score,
            "" if getattr(made, "instruction_of_episode", False) else getattr(made, "instruction", ""),
            dict(getattr(made, "versions", {})),
        )

    def reset(self, seed: int, keys: tuple[str, ...]) -> dict[str, Array]:
        return dict(self._env.reset(seed, keys))

    def step(self, action: Array, keys: tuple[str, ...]) -> tuple[Outcome, dict[str, Array]]:
        step = self._env.step(action, keys)
        outcome = Outcome(step.reward, step.terminated, step.truncated, step.success, step.info)
        return outcome, dict(step.arrays)

    def observe(self, keys: tuple[str, ...]) -> dict[str, Array]:
        return dict(self._env.observe(keys))

    def render(self) -> Array:
        return self._env.render()  # type: ignore[no-any-return]

    def hold(self) -> Array:
        return self._env.hold()  # type: ignore[no-any-return]

    def close(self) -> None:
        self._env.close()
