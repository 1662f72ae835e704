"""One call of a shared policy for several sessions: batch, processors, what the object is lent, whole chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from omni_loop.errors import Reason, StageFailed

from .families import History, Noise
from .load import Loaded
from .noise import Rows, generators, normal, seeded

_ACTION, _IMAGES, _IMAGE = "action", "observation.images", "observation.image"
_NOT_SEEN = ("action", "next.reward", "next.done", "next.truncated", "info")


@dataclass(frozen=True, slots=True)
class Row:
    """One session's part of a call. ``seen``: by feature, its last ``n_obs_steps`` arrays as the wire has them, the
    oldest first (one where the type sees no history). ``left_over float32[n, d]``: of the chunk before, to be
    continued with ``delay`` steps frozen, of which the first ``frozen`` are to be the very same, where guidance leads
    only near them. ``plan float32[h, d]``: tdmpc's last plan."""

    seen: Mapping[str, Sequence[Tensor]]
    prompt: str
    seed: int
    delay: int = 0
    left_over: Tensor | None = None
    plan: Tensor | None = None
    frozen: int = 0


@dataclass(frozen=True, slots=True)
class Predicted:
    """``actions float32[horizon, action_dim]`` in the robot's units, on the CPU; ``raw``, the same in the model's
    space; ``plan`` for the next call, where the row had one."""

    actions: Tensor
    raw: Tensor
    plan: Tensor | None = None


class Predictor:
    """Calls the policy; what it lends the object is gone after every call."""

    def __init__(self, loaded: Loaded, rtc: bool) -> None:
        self._loaded, self._rtc = loaded, rtc
        settings = loaded.described.settings
        steps = int(settings["horizon"]) if loaded.described.type == "diffusion" else loaded.horizon
        self._noise_shape = (steps, int(settings.get("max_action_dim", loaded.described.action_dim)))

    def predict(self, rows: Sequence[Row]) -> list[Predicted]:
        """A chunk per row. Rows of one call have equally long left-overs and equal delays; a type that is not shared
        takes one row.

        Raises:
            StageFailed: the policy gave no chunk of its shape.
        """
        policy = self._loaded.policy
        batch = self._batch(rows)
        with self._lent(rows, batch), self._randomness(rows) as arguments:
            raw = self._chunks(self._call(batch, arguments | (self._continued(rows) if self._rtc else {})))
            _repeat(raw, rows)
            plans = policy._prev_mean if rows[0].plan is not None else None  # [h, 1, d]
        post = self._loaded.post(raw)
        actions = self._checked(torch.as_tensor(post), self._loaded.described.action_dim).float().cpu()
        return [Predicted(a, r, None if plans is None else plans[:, 0]) for a, r in zip(actions, raw, strict=True)]

    def _batch(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Preprocessed: every observation ``[b, ...]``, or ``[b, n_obs_steps, ...]`` where history is seen."""
        device, given = self._loaded.device, {}
        steps = len(next(iter(rows[0].seen.values())))
        for feature in self._loaded.described.inputs:
            stacked = torch.stack([array for row in rows for array in row.seen[feature.name]]).to(device)
            # As LeRobot's prepare_observation_for_inference does it.
            image = stacked.float().div(255).movedim(-1, 1).contiguous() if feature.is_image else stacked.float()
            given[feature.name] = image
        batch = self._loaded.pre({**given, "task": [row.prompt for row in rows for _ in range(steps)]})
        batch = {name: value for name, value in batch.items() if name not in _NOT_SEEN}
        if self._loaded.family.history is History.NONE:
            return batch
        for name, value in batch.items():
            if isinstance(value, Tensor) and len(value) == len(rows) * steps:
                by_session = value.unflatten(0, (len(rows), steps))
                batch[name] = by_session if name in given else by_session[:, -1]
        return batch

    @contextmanager
    def _lent(self, rows: Sequence[Row], batch: dict[str, Any]) -> Iterator[None]:
        """The object's queues and last plan hold these sessions' while the call lasts."""
        policy = self._loaded.policy
        try:
            if self._loaded.family.history is History.QUEUED:
                self._fill(policy._queues, batch)
            if rows[0].plan is not None:
                policy._prev_mean = rows[0].plan[:, None].to(self._loaded.device)
            yield
        finally:
            policy.reset()

    def _fill(self, queues: dict[str, deque[Tensor]], batch: dict[str, Any]) -> None:
        """Observations into the queues as populate_queues would have, and the present ones into the batch."""
        images = [batch[f.name] for f in self._loaded.described.inputs if f.is_image]
        made = {_IMAGES: torch.stack(images, dim=-4), _IMAGE: images[0]} if images else {}
        for name, queue in queues.items():
            if name != _ACTION:
                history = made[name] if name in made else batch[name]
                queue.clear()
                queue.extend(history.unbind(1))
                batch[name] = history[:, -1]

    @contextmanager
    def _randomness(self, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
        """The sessions' own while the call lasts; yields what of it are arguments of the call."""
        seeds, device, kind = [row.seed for row in rows], self._loaded.device, self._loaded.family.noise
        arguments: dict[str, Any] = {}
        with ExitStack() as stack:
            if kind is Noise.GIVEN:
                own = generators(seeds)
                arguments["noise"] = normal(own, self._noise_shape, device)
                if self._loaded.described.type == "diffusion":
                    stack.enter_context(_drawing(self._loaded.policy.diffusion.noise_scheduler, own))
            elif kind is Noise.ROWS:
                stack.enter_context(Rows(seeds))
            elif kind is Noise.SEEDED:
                stack.enter_context(seeded(seeds[0], device))
            if getattr(self._loaded.policy.config, "use_amp", False):
                stack.enter_context(torch.autocast(torch.device(device).type))
            yield arguments

    def _continued(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Arguments of real-time chunking."""
        left = [row.left_over for row in rows if row.left_over is not None]
        previous = torch.stack(left).to(self._loaded.device) if left else None
        return {"inference_delay": rows[0].delay, "prev_chunk_left_over": previous}

    def _call(self, batch: dict[str, Any], arguments: Mapping[str, Any]) -> Tensor:
        policy = self._loaded.policy
        with torch.no_grad():  # not inference_mode: real-time chunking differentiates
            if not self._loaded.family.chunk:
                single: Tensor = policy.select_action(batch)
                return single[:, None]
            chunks: Tensor = policy.predict_action_chunk(batch, **arguments)
        if self._loaded.described.type == "tdmpc":  # the one that gives [h, b, d]
            chunks = chunks.transpose(0, 1)
            repeats = int(self._loaded.described.settings.get("n_action_repeats", 1))
            return chunks[:, :1].expand(-1, repeats, -1) if repeats > 1 else chunks
        return chunks

    def _chunks(self, raw: Tensor) -> Tensor:
        """``[b, horizon, d]`` in the model's space."""
        if raw.ndim != 3 or raw.shape[1] < self._loaded.horizon:
            type_, horizon = self._loaded.described.type, self._loaded.horizon
            text = f"LeRobot's {type_} gave a chunk {list(raw.shape)}; {horizon} steps were wanted"
            raise StageFailed(text, reason=Reason.BAD_OUTPUT)
        return raw[:, : self._loaded.horizon].float()

    def _checked(self, actions: Tensor, action_dim: int) -> Tensor:
        if actions.ndim != 3 or actions.shape[-1] < action_dim:
            text = f"the postprocessor gave actions {list(actions.shape)}; the last axis must be {action_dim}"
            raise StageFailed(text, reason=Reason.BAD_OUTPUT)
        return actions[..., :action_dim]


def _repeat(raw: Tensor, rows: Sequence[Row]) -> None:
    """Frozen rows of ``raw [b, horizon, d]`` as they were in the chunk before."""
    for chunk, row in zip(raw, rows, strict=True):
        if row.left_over is not None and row.frozen:
            chunk[: row.frozen] = row.left_over[: row.frozen].to(chunk)


@contextmanager
def _drawing(scheduler: Any, own: list[torch.Generator]) -> Iterator[None]:
    """A diffusers scheduler whose steps draw each row from its own generator: LeRobot gives it none, and DDPM then
    draws from the global one."""
    step = scheduler.step
    scheduler.step = lambda *args, **kwargs: step(*args, **{**kwargs, "generator": own})
    try:
        yield
    finally:
        del scheduler.step
