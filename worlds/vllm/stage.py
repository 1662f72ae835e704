"""The context stage with vLLM behind it: the same inputs as the embedded one, the same checkpoint and tokens.

Outputs: ``hidden`` (what entered each layer, for the present tick's tokens: the act head makes its keys and values of
them), ``tokens`` (the tick's, the last two written by the model), ``scene``, ``latents`` and ``progress``. A session's
memory is its ticks' tokens, in its typed state; vLLM's cache holds nothing that cannot be computed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from omni_loop.errors import ConfigError
from omni_loop.messages import PayloadKind
from omni_loop.stage import CounterSpec, Outputs, Payload, StageItem, StateSpec, StateView, TensorSpec, in_one
from omni_loop.training.checkpoint import revision
from omni_loop.types import StageKind

from ..context import layout
from ..context.decode import written_logits
from ..context.perceive import INSTRUCTION, load_context
from ..stages.senses import Glance, given_tokens, glance_of
from ..stages.shared import checkpoint, codec_of
from .engine import Answer, Engine, EngineOptions
from .history import History, longest


@dataclass(slots=True)
class Tick:
    """What one item sees, and what it is read behind."""

    glance: Glance
    instruction: Tensor  # int64[32]
    history: History
    state: StateView


class VllmContextStage:
    """See the module's text. ``keep_ticks``: how many past ticks the context starts anew with when it is full
    (:mod:`.history`); 0: half the model's window. ``threads``, ``kv_cache_mib``, ``max_num_seqs``, ``max_model_len``
    (0: as long as a tick's request gets), ``dtype`` and ``enforce_eager`` are the engine's
    (:class:`~.engine.EngineOptions`)."""

    kind = StageKind.CONTEXT
    needs = ("vllm",)  # imported when one is built

    def __init__(
        self,
        checkpoints: str = "",
        device: str = "cpu",
        keep_ticks: int = 0,
        threads: int = 1,
        kv_cache_mib: int = 32,
        max_num_seqs: int = 64,
        max_model_len: int = 0,
        dtype: str = "float32",
        enforce_eager: bool = True,
    ) -> None:
        self._folder: Path = checkpoint("context", checkpoints)
        # For its last norm and its head: both logits of a tick are a product away from the hidden states.
        self.model = load_context(self._folder)
        self._window = self.model.config.window_ticks
        self._keep = keep_ticks or max(1, self._window // 2)
        needed = longest(self._window)
        _check(self._keep, self._window, max_model_len, needed, self.model.config.max_position_embeddings)
        self.codec = codec_of(checkpoint("codec", checkpoints), device)
        self.revision = f"{revision(self._folder)}-vllm{self._keep}"
        self.engine = Engine(
            self._folder,
            EngineOptions(max_model_len or needed, threads, kv_cache_mib, max_num_seqs, dtype, enforce_eager),
        )

    def state_specs(self) -> Mapping[str, StateSpec]:
        return {
            "tokens": TensorSpec((self._window, layout.TICK), "int32"),
            "ticks": CounterSpec(),  # of tokens, how many rows are held
            "imagined": CounterSpec(),  # of these, how many of the last are
        }

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        return in_one(self._tick, self._look, items)

    def close(self) -> None:
        """End vLLM's process."""
        self.engine.close()

    def warm_up(self) -> None:
        instruction = layout.instruction_tokens(INSTRUCTION)
        given = torch.full((layout.GIVEN,), layout.NONE)
        (answer,) = self.engine.ask([torch.cat([instruction, given]).tolist()])
        if isinstance(answer, Exception):
            raise answer

    def _tick(self, item: StageItem) -> Tick:
        glance = glance_of(self.codec, item)
        history = _held(item.state)
        tokens = layout.instruction_tokens(item.prompt or INSTRUCTION)
        return Tick(glance, tokens, history if glance.imagined else history.real(), item.state)

    @torch.no_grad()
    def _look(self, ticks: Sequence[Tick]) -> list[Outputs | Exception]:
        given = given_tokens(self.codec, [tick.glance for tick in ticks])
        answers = self.engine.ask(
            [tick.history.prompt(tick.instruction, tokens) for tick, tokens in zip(ticks, given, strict=True)]
        )
        return [
            answer if isinstance(answer, Exception) else self._outputs(tick, tokens, answer)
            for tick, tokens, answer in zip(ticks, given, answers, strict=True)
        ]

    def _outputs(self, tick: Tick, given: Tensor, answer: Answer) -> Outputs:
        """The outputs of a tick, which is staged."""
        tokens = torch.cat([given, torch.tensor(answer.tokens)])
        after = tick.history.with_tick(tokens, tick.glance.imagined, self._window, self._keep)
        _hold(tick.state, after, self._window)
        written = [layout.QUERY_AT, layout.PROGRESS_AT]
        logits = written_logits(self.model, self.model.model.norm(answer.hidden[-1, written]))
        said = {
            "progress": layout.progress_values(logits[0]),
            "done": layout.done_probability(logits[1], self.model.config.done_bias),
        }
        return {
            "hidden": Payload(PayloadKind.HIDDEN, {"hidden": answer.hidden[:-1]}),
            "tokens": Payload(PayloadKind.TOKENS, {"tokens": tokens}),
            **tick.glance.outputs(),
            "progress": Payload(PayloadKind.PROGRESS, said),
        }


def _check(keep: int, window: int, max_model_len: int, needed: int, most: int) -> None:
    if not 1 <= keep <= window:
        raise ConfigError(f"keep_ticks is {keep}; the model's window has 1..{window} past ticks")
    if max_model_len and not needed <= max_model_len <= most:
        raise ConfigError(f"max_model_len is {max_model_len}; a tick's request needs {needed}, the model takes {most}")


def _held(state: StateView) -> History:
    n = state.counter("ticks").get()
    return History(state.tensor("tokens").get()[:n], state.counter("imagined").get())


def _hold(state: StateView, history: History, window: int) -> None:
    n = len(history.ticks)
    tokens = history.ticks.new_zeros(window, layout.TICK)
    tokens[:n] = history.ticks
    state.tensor("tokens").set(tokens)
    state.counter("ticks").set(n)
    state.counter("imagined").set(history.imagined)


#: Factory registered as ``context_vllm``.
context_vllm = VllmContextStage
