"""How good an imagined frame is: by the distance of its scene or of its latents to a goal's, or by the context model.

Shapes: ``n`` futures, ``h`` steps, ``p`` tokens a frame, ``c`` numbers a token; positions and actions in -1..1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from omni_loop.errors import UnknownName, nearest

from .codec import FrameCodec
from .context import layout
from .context.decode import Reading, read_instruction, read_tick
from .context.llama import ContextModel

MEASURES = ("points", "latents")
AGENT_WEIGHT = 0.2  # of the agent's distance against that of a keypoint of the T


def check_measure(name: str) -> None:
    """Raise UnknownName unless ``name`` is one of :data:`MEASURES`."""
    if name not in MEASURES:
        raise UnknownName(f"no distance to a goal is called {name!r}.{nearest(name, MEASURES)}")


class GoalCost:
    """Distance of a future's last frame to a goal frame, for :class:`~.plan.Search`. (Reading every frame on the way
    would take as long as imagining them.)

    ``points``: mean distance of the T's keypoints, and a little of the agent's, as the codec reads them from latents.
    It falls all the way to the goal. ``latents``: root mean square of the latents' difference, which only falls once
    the shapes overlap.
    """

    def __init__(self, codec: FrameCodec, goal: Tensor, measure: str = "points") -> None:
        """``goal [p, c]``: latents of the frame to reach. Raises UnknownName when ``measure`` is none."""
        check_measure(measure)
        self._codec, self._goal, self._measure = codec, goal, measure
        self._points = self._read(goal[None])[0]

    def __call__(self, latents: Tensor, actions: Tensor) -> Tensor:
        """Costs ``[n]`` of futures ``latents [n, h, p, c]``."""
        last = latents[:, -1]
        return self._scene(last) if self._measure == "points" else (last - self._goal).square().mean((1, 2)).sqrt()

    def _scene(self, latents: Tensor) -> Tensor:
        away = (self._read(latents) - self._points).norm(dim=-1)
        return (away[:, 1:].mean(1) + AGENT_WEIGHT * away[:, 0]) / (1 + AGENT_WEIGHT)

    def _read(self, latents: Tensor) -> Tensor:
        return self._codec.scene(self._codec.unpatchify(latents))


class Judge:
    """Reads imagined frames with the context model, each as the tick to come behind one common past."""

    def __init__(self, codec: FrameCodec, model: ContextModel) -> None:
        self._codec, self._model = codec, model

    @property
    def latents(self) -> tuple[int, int]:
        """Shape ``[p, c]`` of a frame."""
        return self._codec.config.tokens_per_frame, self._codec.config.token_dim

    def past(self, instruction: str) -> Tensor:
        """``[layers, 2, s, g, e]`` of a session that has seen nothing but its instruction."""
        tokens = layout.instruction_tokens(instruction).to(self._model.frequencies.device)
        return read_instruction(self._model, tokens[None])[:, :, 0]

    @torch.no_grad()
    def read(self, past: Tensor, latents: Tensor, actions: Tensor) -> Reading:
        """Reading of ``n`` frames ``latents [n, p, c]``, to which ``actions [n, h, 2]`` led from the last tick on;
        ``past [layers, 2, s, g, e]``."""
        z, n, last = self._codec.unpatchify(latents), len(latents), actions.shape[1] - 1
        executed = actions[:, [last // 2, last]]
        known = torch.ones(n, dtype=torch.bool, device=latents.device)
        given = layout.given_tokens(self._codec.tokens(z), self._codec.scene(z), executed, known)
        return read_tick(self._model, past.unsqueeze(2).expand(-1, -1, n, -1, -1, -1), given)


class ProgressCost:
    """What is left to do after a future, 0..1, as ``judge`` sees its last frame behind ``past``."""

    def __init__(self, judge: Judge, past: Tensor) -> None:
        self._judge, self._past = judge, past

    def __call__(self, latents: Tensor, actions: Tensor) -> Tensor:
        return 1 - self._judge.read(self._past, latents[:, -1], actions).progress
