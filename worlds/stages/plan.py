"""What the frames stage does with many futures at once: search for the best actions, or imagine given chunks.

Both read the session's cache and last frame and change nothing. Each is a :class:`Work`, which takes one batched pass
of all its futures at a time, so that other sessions have their turns in between.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from omni_loop.errors import Reason, StateError, TensorError
from omni_loop.messages import PayloadKind, Scalar
from omni_loop.stage import Outputs, Payload, StageItem

from ..codec import FrameCodec
from ..context.perceive import INSTRUCTION, load_context
from ..dit import DiT
from ..futures import Futures, first_frame
from ..judge import GoalCost, Judge, ProgressCost, check_measure
from ..plan import Cost, Found, Search, SearchConfig, planning
from .shared import TABLE_HALF, checkpoint, codec_of, encode, tensor_of, to_px, to_unit

AHEAD = 8  # steps of a given chunk that are imagined: those that will be executed


class Work:
    """A job of a stage whose passes are the yields of ``work``."""

    def __init__(self, work: Generator[None, None, Outputs]) -> None:
        self._work = work
        self._outputs: Outputs | None = None

    @property
    def finished(self) -> bool:
        return self._outputs is not None

    @property
    def outputs(self) -> Outputs:
        """Raises StateError before the work is finished."""
        if self._outputs is None:
            raise StateError("the work is not finished")
        return self._outputs

    @torch.no_grad()
    def advance(self) -> Exception | None:
        """One pass; the error that ends the work, if it met one."""
        try:
            next(self._work)
        except StopIteration as end:
            self._outputs = end.value
        except Exception as e:  # this job's own, as a stage's ``advance`` reports it
            return e
        return None


@lru_cache(maxsize=2)
def judge_of(checkpoints: str, device: str) -> Judge:
    """Loaded when the first plan without a goal asks for it."""
    codec = codec_of(checkpoint("codec", checkpoints), device)
    return Judge(codec, load_context(checkpoint("context", checkpoints)).to(device))


class Planner:
    """Part of the frames stage; shares its weights. ``max_predict`` bounds the steps of a future; ``measure`` is the
    distance to a goal, see :class:`~..judge.GoalCost`."""

    def __init__(
        self,
        model: DiT,
        codec: FrameCodec,
        revision: str,
        checkpoints: str,
        device: str,
        max_predict: int,
        measure: str = "points",
    ) -> None:
        check_measure(measure)
        self._model, self._codec, self._revision, self._measure = model, codec, revision, measure
        self._checkpoints, self._device, self._max_predict = checkpoints, device, max_predict

    def plan(self, item: StageItem) -> Work:
        """Search for actions. Input ``goal``: ``goal uint8[h, w, 3]`` to reach (without it: the most progress, as the
        context model sees it) and ``init float32[horizon, 2]`` in table pixels to begin at (without it: the agent
        stays), both optional; ``item.params`` as :class:`~omni_loop.loop.request.PlanRequest`.

        Outputs ``plan``: ``actions float32[horizon, 2]`` in table pixels, how they were found as its meta, and
        ``latents`` of the frames they are thought to lead to.

        Raises:
            InvalidInput, UnknownName, TensorError: what was asked for cannot be searched.
            StateError: the session has no frame yet.
        """
        p, d = item.params, SearchConfig()
        config = SearchConfig(
            method=str(p.get("method", d.method)),
            horizon=int(p.get("horizon", d.horizon)),
            candidates=int(p.get("candidates", d.candidates)),
            iterations=int(p.get("iterations", d.iterations)),
        )
        config.check(self._max_predict)
        given: Mapping[str, Any] = item.inputs["goal"].arrays if "goal" in item.inputs else {}
        futures, last = self._futures(item, config.horizon)
        init = self._init(given.get("init"), config.horizon, last)
        search = Search(config, init.cpu(), item.noise_seed("plan"))
        return Work(self._search(item, search, futures, self._cost(given.get("goal")), float(p.get("budget_ms", 0.0))))

    def imagine(self, item: StageItem) -> Work:
        """What the first steps of given ``chunks`` (``actions float32[n, steps, 2]`` in table pixels) lead to, from
        the frame that the context stage saw (``latents [1, 16, c]``): a lone one, whose past is not known. Output
        ``futures``: ``latents [n, ahead, 16, c]``.

        Raises:
            TensorError: chunks or latents of another shape.
        """
        chunks = to_unit(item.inputs["chunks"].arrays["actions"])
        if chunks.ndim != 3 or 0 in chunks.shape or chunks.shape[2] != self._model.config.action_dim:
            raise TensorError(f"'chunks' has shape {list(chunks.shape)}, expected [n, steps, 2]")
        ahead = min(AHEAD, chunks.shape[1], self._max_predict)
        c, seen = self._model.config, torch.as_tensor(item.inputs["latents"].arrays["latents"], device=self._device)
        if tuple(seen.shape) != (1, c.tokens, c.token_dim):
            raise TensorError(f"'latents' has shape {list(seen.shape)}, expected {[1, c.tokens, c.token_dim]}")
        return Work(self._follow(item, seen.float(), chunks[:, :ahead].to(self._device)))

    def _futures(self, item: StageItem, horizon: int) -> tuple[Futures, Tensor]:
        """Forks of the session's cache, and its last frame ``[p, c]``."""
        held = item.state.ring("recent").items()
        if not held:
            text = "no frame to go on from: send one with Recondition (or Infer) first"
            raise StateError(text, reason=Reason.BAD_REQUEST)
        last = torch.as_tensor(held[-1], device=self._device)
        kv = torch.as_tensor(item.state.kv("kv").gather())
        return Futures(self._model, kv, last, self._noise(item, last, horizon)), last

    def _noise(self, item: StageItem, like: Tensor, frames: int) -> Tensor:
        """``[frames, p, c]``, as the stage itself draws it for one frame after the other."""
        generator = torch.Generator().manual_seed(item.noise_seed("frames"))
        return torch.stack([torch.randn(like.shape, generator=generator) for _ in range(frames)]).to(self._device)

    def _init(self, given: Any, horizon: int, last: Tensor) -> Tensor:
        if given is None:
            agent = self._codec.scene(self._codec.unpatchify(last[None]))[0, 0]
            return agent.expand(horizon, -1)
        init = to_unit(given)
        if init.shape != (horizon, self._model.config.action_dim):
            raise TensorError(f"'init' has shape {list(init.shape)}, expected [{horizon}, 2]")
        return init

    def _cost(self, goal: Any) -> Cost:
        if goal is None:
            judge = judge_of(self._checkpoints, self._device)
            return ProgressCost(judge, judge.past(INSTRUCTION))
        image, size = tensor_of(goal), self._codec.config.frame_size
        if image.shape != (size, size, 3) or image.dtype != torch.uint8:
            raise TensorError(f"'goal' is {image.dtype}{list(image.shape)}, expected uint8[{size}, {size}, 3]")
        return GoalCost(self._codec, encode(self._codec, image[None])[0], self._measure)

    def _search(
        self, item: StageItem, search: Search, futures: Futures, cost: Cost, budget_ms: float
    ) -> Generator[None, None, Outputs]:
        def rollout(actions: Tensor) -> Generator[None, None, Tensor]:
            return futures.imagine(actions.to(self._device))

        found: Found = yield from planning(search, rollout, cost, budget_ms)
        actions = to_px(found.actions).clamp(0, 2 * TABLE_HALF).float().cpu()
        meta: dict[str, Scalar] = {
            "cost": found.cost,
            "first_cost": found.first_cost,
            "candidates": found.candidates,
            "iterations": found.iterations,
            "horizon": search.config.horizon,
            "out_of_time": found.out_of_time,
            "revision": self._revision,
        }
        return {
            "plan": Payload(PayloadKind.ACTIONS, {"actions": actions}, meta),
            "latents": Payload(PayloadKind.LATENTS, {"latents": found.latents.clone()}, {"first_step": item.step + 1}),
        }

    def _follow(self, item: StageItem, seen: Tensor, actions: Tensor) -> Generator[None, None, Outputs]:
        kv = first_frame(self._model, seen)
        yield
        futures = Futures(self._model, kv, seen[0], self._noise(item, seen[0], actions.shape[1]))
        latents = yield from futures.imagine(actions)
        return {"futures": Payload(PayloadKind.LATENTS, {"latents": latents}, {"first_step": item.step + 1})}
