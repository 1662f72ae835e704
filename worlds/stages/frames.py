"""The frames stage: observes real frames, predicts the next ones under given actions.

A frame is one block of the pool: OBSERVED when it was real, IMAGINED when it was predicted. Observing drops
every block from its first step on. For that the blocks of ``max_predict`` more frames are kept than the model
looks at: what follows is as if nothing had been imagined.

Every frame takes some passes, a predicted one its denoise steps and then the clean pass that writes its keys and
values, a real one the clean pass alone. With a frame's clean pass the next frame takes its first one. Between two
passes the jobs of other sessions may join. Predicted frames can be seen on the way: the first one as the model guesses
it after one pass, and each as soon as it is denoised.

Inputs: ``actions`` (the client's, or the act head's chunk), ``observation`` (real frames to recondition on) or
``latents`` (of the frame the context stage saw). Output: ``latents [n, 16, c]`` of the predicted frames with
the ``actions [n, 2]`` that lead to them. Given ``chunks``, or asked to plan: see :mod:`.plan`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from omni_loop.errors import InvalidInput, Reason, StateError, TensorError
from omni_loop.stage import CounterSpec, Job, KVSpec, Outputs, RingSpec, StageItem, StateSpec, StateView, in_steps
from omni_loop.training.checkpoint import load_config, load_weights, revision
from omni_loop.types import Op, StageKind

from ..dit import DiT, DiTConfig, noise_levels
from .frame_job import FrameJob, side_by_side
from .plan import Planner, Work
from .shared import checkpoint, codec_of, encode, images_of, to_unit


class FramesStage:
    """See the module's text. ``max_predict`` bounds the frames of one tick, and with it its scratch; ``plan_cost`` is
    how far plans think a goal is: by ``points`` of the scene or by ``latents``."""

    kind = StageKind.FRAMES

    def __init__(
        self,
        checkpoints: str = "",
        device: str = "cpu",
        max_predict: int = 16,
        denoise_steps: int = 0,
        plan_cost: str = "points",
    ) -> None:
        folder = checkpoint("world", checkpoints)
        config = load_config(folder, DiTConfig)
        self.model = DiT(config)
        load_weights(folder, self.model)
        self.model.to(device)
        self.codec = codec_of(checkpoint("codec", checkpoints), device)
        self.steps = denoise_steps or config.denoise_steps
        self.max_predict, self.device, self.revision = max_predict, device, revision(folder)
        self.planner = Planner(self.model, self.codec, self.revision, checkpoints, device, max_predict, plan_cost)

    def state_specs(self) -> Mapping[str, StateSpec]:
        c = self.model.config
        held = c.window - 1 + self.max_predict
        return {
            "kv": KVSpec(
                layers=c.layers,
                kv_heads=c.heads,
                head_dim=c.head_dim,
                block_size=c.tokens,
                window_blocks=held,
                scratch_blocks=self.max_predict + 1,
            ),
            # Latents of the same frames: the residual's base, also after a step back.
            "recent": RingSpec((c.tokens, c.token_dim), capacity=held),
            "origin": CounterSpec(),  # control step of the first frame
        }

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        return in_steps(self, items)

    def begin(self, item: StageItem) -> FrameJob | Work:
        if item.op is Op.PLAN:
            return self.planner.plan(item)
        if "chunks" in item.inputs:
            return self.planner.imagine(item)
        if item.op is Op.RECONDITION and "observation" in item.inputs:
            job = self._recondition(item)
        else:
            job = self._predict(item)
        ring, c = item.state.ring("recent").items(), self.model.config
        # More is held than the model looks at: see the module's text.
        past = item.state.kv("kv").gather(last=(c.window - 1) * c.tokens)
        job.start(
            self.model.roped_context(past.unsqueeze(2)), torch.as_tensor(ring[-1], device=self.device) if ring else None
        )
        return job

    def advance(self, jobs: Sequence[Job]) -> Sequence[Exception | None]:
        """One pass for each: those with images to be encoded get their latents, all others a pass of the model; one
        that imagines many futures is a batch of its own."""
        most = self.model.config.window - 1
        groups: dict[int, list[FrameJob]] = {}
        for job in cast("Sequence[FrameJob | Work]", jobs):
            if isinstance(job, Work):
                continue
            groups.setdefault(-1 if job.images is not None else min(job.position, most), []).append(job)
        for held, group in groups.items():
            if held < 0:
                self._encode(group)
            else:
                self._pass(group)
        return [job.advance() if isinstance(job, Work) else None for job in jobs]

    def parts(self, job: Job) -> Sequence[Outputs]:
        """Predicted frames as they come; searches and given chunks have none to show."""
        return () if isinstance(job, Work) else cast("FrameJob", job).parts()

    def finish(self, job: Job) -> Outputs:
        """Stage what the job made; raises what the state refuses."""
        return job.outputs if isinstance(job, Work) else cast("FrameJob", job).store()

    def _encode(self, jobs: list[FrameJob]) -> None:
        frames = encode(self.codec, torch.cat([cast("Tensor", job.images) for job in jobs]))
        for job, latents in zip(jobs, frames.split([len(cast("Tensor", job.images)) for job in jobs]), strict=True):
            job.see(latents)

    def _pass(self, jobs: list[FrameJob]) -> None:
        """One pass of jobs with equally many frames behind the present one. Those ahead stand behind all present."""
        jobs, context = side_by_side(jobs)
        ahead = [i for i, job in enumerate(jobs) if job.ahead is not None]
        rows = [*range(len(jobs)), *ahead]
        frames = [job.present for job in jobs] + [job.ahead for job in jobs if job.ahead is not None]
        given = torch.tensor([(frame.level, frame.known, frame.ratio) for frame in frames], device=self.device)
        level, known, ratio = given.split(1, 1)
        action = torch.stack([frame.action for frame in frames])[:, None]
        x, prev = torch.stack([f.x for f in frames])[:, None], torch.stack([f.prev for f in frames])[:, None]
        clean = [frame.level == 0 for frame in frames]
        if any(clean):
            quiet = all(clean[: len(jobs)])  # no residual is wanted of those present
            residual, fresh = self.model.frame(x, prev, level, action, known > 0, context, ahead, quiet)
            # The pass itself keeps those that have one ahead.
            context.keep([row for i, row in enumerate(rows) if clean[i] and (i >= len(jobs) or row not in ahead)])
        else:
            quiet = False
            residual = self.model.residual(x, prev, level, action, known > 0, context)
        guesses: dict[int, Tensor] = {}  # of the noisy ones: where they would be without noise
        if not all(clean):
            first = len(jobs) if quiet else 0
            guess = prev[first:] + residual
            guesses = dict(enumerate(guess[:, 0].unbind(), first))
            noisy = torch.lerp(guess, x[first:], ratio[first:, :, None, None])
            x = torch.cat([x[:first], noisy]) if first else noisy
        for i, (row, latents) in enumerate(zip(rows, x[:, 0].unbind(), strict=True)):
            if clean[i]:
                jobs[row].end_frame(fresh[:, :, i])
            else:
                jobs[row].end_step(latents, guesses[i])

    def _recondition(self, item: StageItem) -> FrameJob:
        arrays = item.inputs["observation"].arrays
        first, images = int(item.params.get("first_step", item.step)), images_of(self.codec, arrays["image"])
        if not 0 < (n := len(images)) <= self.max_predict + 1:
            raise InvalidInput(f"{n} frames at once, between 1 and {self.max_predict + 1} can be observed")
        executed = self._actions("executed", arrays.get("executed", torch.zeros(0, self.model.config.action_dim)))
        fresh = self._rewind(item.state, first)
        expected = n - 1 if fresh else n
        if len(executed) != expected:
            raise InvalidInput(
                f"{n} frames from step {first} need {expected} executed actions (action t leads from frame t "
                f"to t + 1), got {len(executed)}"
            )
        return FrameJob(item, executed, {"first_step": first}, observed=n, images=images)

    def _rewind(self, state: StateView, first: int) -> bool:
        """Make ``first`` the next step to be observed; whether it is the first frame of all."""
        kv, ring, c = state.kv("kv"), state.ring("recent"), self.model.config
        origin, held = state.counter("origin").get(), list(ring.items())
        present = origin + kv.total // c.tokens
        if not held or first <= origin:
            self._restart(state, first)
            return True
        if first > present:
            raise StateError(
                f"step {first} does not follow: the session holds frames up to step {present - 1}",
                reason=Reason.BAD_REQUEST,
            )
        oldest = present - len(held)
        if first - oldest < min(c.window - 1, first - origin):
            raise StateError(
                f"step {first} lies too far back: frames can be replaced from step {oldest + c.window - 1} on, or all "
                f"of them from step {origin}",
                reason=Reason.BAD_REQUEST,
            )
        if first < present:
            kv.truncate((first - origin) * c.tokens)
            ring.clear()
            for latents in held[: first - oldest]:
                ring.push(latents)
        return False

    def _restart(self, state: StateView, first: int) -> None:
        state.kv("kv").truncate(0)
        state.ring("recent").clear()
        state.counter("origin").set(first)

    def _predict(self, item: StageItem) -> FrameJob:
        if "actions" not in item.inputs:
            raise InvalidInput("predict needs the 'actions' to predict under: float32[n, 2]")
        actions = self._actions("actions", item.inputs["actions"].arrays["actions"])
        count = int(item.params.get("frames", 0) or item.params.get("steps", 0)) or len(actions)
        if not 0 < count <= min(len(actions), self.max_predict):
            raise InvalidInput(
                f"{count} frames asked for, between 1 and {min(len(actions), self.max_predict)} can be predicted"
            )
        seen = None
        if "latents" in item.inputs and item.op is not Op.PREDICT:
            seen = self._latents(item.inputs["latents"].arrays["latents"])
            # A lone real frame every few steps: what came before does not lead to it frame by frame.
            self._restart(item.state, item.step)
        elif not item.state.ring("recent").items():
            raise StateError("no frame to predict from: send one with Recondition (or Infer) first")
        return FrameJob(
            item,
            actions[:count],
            {"first_step": item.step + 1},
            observed=0 if seen is None else 1,
            imagined=count,
            levels=noise_levels(self.steps),
            latents=seen,
        )

    def _actions(self, name: str, px: Any) -> Tensor:
        """Actions ``[n, a]`` in -1..1."""
        actions, width = to_unit(px), self.model.config.action_dim
        if actions.ndim != 2 or actions.shape[1] != width:
            raise TensorError(f"{name!r} has shape {list(actions.shape)}, expected [n, {width}]")
        return actions.to(self.device)

    def _latents(self, array: Any) -> Tensor:
        """The one frame that was seen, ``[1, 16, c]``."""
        c = self.model.config
        latents = torch.as_tensor(array, device=self.device)
        if tuple(latents.shape) != (1, c.tokens, c.token_dim):
            raise TensorError(f"'latents' has shape {list(latents.shape)}, expected {[1, c.tokens, c.token_dim]}")
        return latents.float()

    def warm_up(self) -> None:
        c = self.model.config
        context = self.model.roped_context(torch.zeros(c.layers, 2, 1, 0, c.heads, c.head_dim, device=self.device))
        z, action = torch.zeros(1, 1, c.tokens, c.token_dim), torch.zeros(1, 1, c.action_dim)
        known, level = torch.ones(1, 1, dtype=torch.bool), torch.ones(1, 1)
        z, action, known, level = (t.to(self.device) for t in (z, action, known, level))
        self.model.frame(z, z, level, action, known, context)


#: Factory registered as ``frames``.
frames = FramesStage
