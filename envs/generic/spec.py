"""What a suite's ``env_options`` say about an environment of gymnasium.

.. code-block:: yaml

    env: gymnasium
    env_options:
      id: FetchReach-v4                  # as in gymnasium.make
      import: gymnasium_robotics         # module, or list of modules, that registers it
      kwargs: {reward_type: dense}       # of gymnasium.make
      observations:                      # name of an array -> where it is found
        state: [observation, desired_goal]
        hand: "observation[0:3]"
        image: {render: true, unit: RGB}
      action: {low: -1, high: 1, unit: "", hold: 0}
      success: is_success                # the entry of info that says so, at every step
      info: [distance]                   # further numbers of info that are kept
      score: distance                    # the one of them that says how near success is
      control_hz: 25                     # the environment's render_fps where it is not named
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import Field, JsonValue, field_validator, model_validator

from omni_loop.strict import Section

_DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "bool")


class Observation(Section):
    """One array. ``source`` is a path (``images/top``; ``""`` for an observation that is an array itself), of which
    ``[a:b]`` takes a part; several are laid end to end. None: the array's own name. ``render``: what the environment
    renders instead.

    ``shape`` and ``dtype`` are the environment's where they are not named; float64 becomes float32.
    """

    source: str | tuple[str, ...] | None = None
    render: bool = False
    dtype: str | None = None
    shape: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    unit: str = ""
    low: float | None = None
    high: float | None = None
    description: str = ""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        """A path alone, or a list of them, is a source. Lists are tuples here: what a validator hands on is no JSON."""
        said = {"source": given} if isinstance(given, (str, list, tuple)) else given
        if not isinstance(said, Mapping):
            return said
        return {key: tuple(value) if isinstance(value, list) else value for key, value in said.items()}

    @field_validator("source", mode="before")
    @classmethod
    def _paths(cls, given: Any) -> Any:
        several = isinstance(given, tuple) and given and all(isinstance(path, str) for path in given)
        if not (given is None or isinstance(given, str) or several):
            raise ValueError('wanted a path such as "images/top" or "state[0:3]", or a list of them')
        return given

    @model_validator(mode="after")
    def _consistent(self) -> Observation:
        if self.render and self.source is not None:
            raise ValueError("what is rendered has no source")
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(_DTYPES)}")
        return self


class Action(Section):
    """Bounds ``low`` and ``high`` of every dimension, as a policy gives them.

    Not named, they are the environment's, or -1 and 1 where its bounds differ by dimension. Where they are not the
    environment's own, actions are rescaled to those, each dimension by itself, unless ``rescale`` is off: then the
    environment is said to take what is named here, whatever its space says.

    ``hold`` is the action that does least: one number for all dimensions, one for each, or the source of the place in
    what is observed, in the environment's own units. None: zero, which is right where actions are displacements.
    """

    low: float | None = None
    high: float | None = None
    rescale: bool = True
    hold: float | tuple[float, ...] | str | None = None
    unit: str = ""
    description: str = ""

    @field_validator("hold", mode="before")
    @classmethod
    def _listed(cls, given: Any) -> Any:
        return tuple(given) if isinstance(given, list) else given

    @model_validator(mode="after")
    def _consistent(self) -> Action:
        if (self.low is None) != (self.high is None):
            raise ValueError("low and high go together")
        if self.low is not None and self.high is not None:
            if not (np.isfinite([self.low, self.high]).all() and self.low < self.high):
                raise ValueError(f"{self.low:g}..{self.high:g} is no range")
        elif not self.rescale:
            raise ValueError("rescale: false needs low and high")
        return self


class GymnasiumOptions(Section):
    """See the module's text."""

    id: str = Field(min_length=1)
    imports: tuple[str, ...] = Field(default=(), alias="import")
    kwargs: Mapping[str, JsonValue] = Field(default_factory=dict)
    render_mode: str | None = "rgb_array"  # null for an environment that takes none
    observations: Mapping[str, Observation] = Field(min_length=1)
    action: Action = Action()
    success: str = Field(min_length=1)
    info: tuple[str, ...] = ()
    score: str | None = None
    control_hz: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    fast_rendering: bool = True  # of MuJoCo's scenes: without shadows

    @field_validator("imports", mode="before")
    @classmethod
    def _modules(cls, given: Any) -> Any:
        return (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list) else given

    @field_validator("imports")
    @classmethod
    def _dotted(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for module in given:
            if not all(part.isidentifier() for part in module.split(".")):
                raise ValueError(f"{module!r} is no name of a module")
        return given

    @field_validator("kwargs")
    @classmethod
    def _no_double(cls, given: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
        for name, where in (
            ("render_mode", "render_mode beside kwargs"),
            ("max_episode_steps", "the suite's max_steps"),
        ):
            if name in given:
                raise ValueError(f"{name} is said by {where}")
        return given

    @property
    def info_keys(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.info, *([self.score] if self.score else []))))
