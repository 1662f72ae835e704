"""A runner: it owns stages and their sessions' state, and turns each command into exactly one report.

It knows no transport. A handle (:mod:`.local`, :mod:`.process`) feeds it from one thread, command by command::

    RunStage -> get inputs -> begin transaction -> stage.run -> check outputs -> put outputs -> Done(receipts)
                                        any failure on the way: discard, put nothing -> Failed
    Commit / Discard decide the transaction.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import registry
from ..connect.base import Connector, as_numpy
from ..errors import (
    ConfigError,
    InvalidInput,
    OmniLoopError,
    Reason,
    StageFailed,
    StateError,
    UnknownName,
    UnknownSession,
    nearest,
)
from ..messages import (
    CloseSession,
    Command,
    Commit,
    Discard,
    Done,
    Failed,
    OpenSession,
    PayloadKey,
    Receipt,
    ReleasePayloads,
    Report,
    ResetSession,
    RunStage,
    Scalar,
)
from ..stage import Outputs, Payload, Stage, StageItem
from .cells import is_finite
from .state import Budget, StateManager

Factory = Callable[..., Stage]
StageEntry = tuple[str, Factory | str, Mapping[str, Scalar]]  # "pipeline/stage", factory or its name, options


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """``threads`` of torch for this runner; ``device`` of its state, and of its stages unless their options say."""

    threads: int = 1
    device: str = "cpu"
    budget: Budget = field(default_factory=Budget)


@dataclass(slots=True)
class _Session:
    seed: int
    prompt: str
    epoch: int = 0


class Runner:
    """See the module's text. Not thread-safe: one thread builds it, warms it up and feeds it."""

    def __init__(
        self, stages: Sequence[StageEntry], connector: Connector, settings: RunnerSettings = RunnerSettings()
    ) -> None:
        torch.set_num_threads(settings.threads)
        self.connector = connector
        self._settings = settings
        self._stages = {name: _build(name, factory, options, settings) for name, factory, options in stages}
        specs = {name: stage.state_specs() for name, stage in self._stages.items()}
        self.state = StateManager(specs, settings.budget, settings.device)
        self._sessions: dict[str, _Session] = {}
        self._handlers: dict[type, Callable[[Any], Done]] = {
            OpenSession: self._open,
            RunStage: self._run,
            Commit: self._commit,
            Discard: self._discard,
            ResetSession: self._reset,
            CloseSession: self._close,
            ReleasePayloads: self._release,
        }

    def warm_up(self) -> None:
        """One forward pass of every stage. Raises typed errors as a stage does, others as StageFailed naming it."""
        with torch.no_grad():
            for name, stage in self._stages.items():
                try:
                    stage.warm_up()
                except OmniLoopError:
                    raise
                except Exception as e:
                    raise StageFailed(f"the stage {name!r} cannot warm up: {type(e).__name__}: {e}") from e

    def handle(self, request: int, command: Command, queue_ms: float = 0.0) -> Report:
        """Execute one command; whatever goes wrong is a :class:`Failed`."""
        try:
            done = self._handlers[type(command)](command)
            return Done(request, done.outputs, done.model_ms, queue_ms)
        except OmniLoopError as e:
            detail = traceback.format_exc() if e.__cause__ is not None else ""
            return Failed(request, e.code, e.reason, e.retryable, e.text, detail)
        except Exception as e:
            text = f"the runner failed at {type(command).__name__}: {type(e).__name__}"
            return Failed(request, StageFailed.code, StageFailed.reason, False, text, traceback.format_exc())

    def close(self) -> None:
        """Close every session. Raises PoolCorrupt when the books do not balance then."""
        for session in self.state.sessions():
            self._close(CloseSession(session))
        self.state.check()

    def _open(self, command: OpenSession) -> Done:
        self.state.open(command.session, command.stages)
        self._sessions[command.session] = _Session(command.seed, command.prompt)
        return Done(0)

    def _run(self, command: RunStage) -> Done:
        session = self._current(command.session, command.epoch)
        stage = self._stage(command.stage)
        inputs = {name: self.connector.get(receipt) for name, receipt in command.inputs.items()}
        view = self.state.begin(command.session, command.stage, command.tick)
        try:
            item = StageItem(
                session=command.session,
                seed=session.seed,
                epoch=command.epoch,
                tick=command.tick,
                op=command.op,
                step=command.step,
                prompt=session.prompt,
                inputs=inputs,
                params=command.params,
                state=view,
            )
            begin = time.perf_counter()
            outputs = _run_one(command.stage, stage, item)
            if self._settings.device.startswith("cuda"):
                torch.cuda.synchronize()
            model_ms = (time.perf_counter() - begin) * 1e3
            self.state.seal(command.session, command.stage)
            receipts = self._publish(command, outputs)
        except BaseException:
            self.state.discard(command.session, command.tick, (command.stage,))
            raise
        return Done(0, receipts, model_ms)

    def _publish(self, command: RunStage, outputs: Outputs) -> dict[str, Receipt]:
        """Check every output, then put all of them or none."""
        checked = {name: self._checked(command.stage, name, payload) for name, payload in outputs.items()}
        receipts: dict[str, Receipt] = {}
        try:
            for name, payload in checked.items():
                key = PayloadKey(f"{command.stage}.{name}", command.session, command.epoch, command.tick)
                receipts[name] = self.connector.put(key, payload)
        except BaseException:
            for receipt in receipts.values():
                self.connector.cleanup(receipt.key)
            raise
        return receipts

    def _checked(self, stage: str, output: str, payload: Payload) -> Payload:
        if not isinstance(payload, Payload):
            text = f"stage {stage!r} gave a {type(payload).__name__} as {output!r}, not a Payload"
            raise StageFailed(text, reason=Reason.BAD_OUTPUT)
        arrays = {}
        for name, value in payload.arrays.items():
            tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(as_numpy(value))
            if not is_finite(tensor):
                text = f"stage {stage!r} gave values that are not finite: array {name!r} of output {output!r}"
                raise StageFailed(text, reason=Reason.BAD_OUTPUT)
            # A view of the pool would change under its reader, since blocks are reused after the tick.
            owned = tensor.numel() > 0 and self.state.owns_memory(tensor.data_ptr())
            arrays[name] = tensor.clone() if owned else value
        return Payload(payload.kind, arrays, payload.meta, payload.schema)

    def _commit(self, command: Commit) -> Done:
        self._current(command.session, command.epoch)
        self.state.commit(command.session, command.tick, command.stages)
        return Done(0)

    def _discard(self, command: Discard) -> Done:
        session = self._find(command.session)
        if command.epoch >= session.epoch:  # a reset has discarded what older epochs staged
            self.state.discard(command.session, command.tick, command.stages)
        return Done(0)

    def _reset(self, command: ResetSession) -> Done:
        session = self._current(command.session, command.epoch)
        self.state.reset(command.session)
        session.seed = session.seed if command.seed is None else command.seed
        session.prompt = session.prompt if command.prompt is None else command.prompt
        return Done(0)

    def _close(self, command: CloseSession) -> Done:
        self._find(command.session)
        self.state.close(command.session)
        del self._sessions[command.session]
        self.connector.cleanup_session(command.session)
        return Done(0)

    def _release(self, command: ReleasePayloads) -> Done:
        for key in command.keys:
            self.connector.cleanup(key)
        return Done(0)

    def _find(self, name: str) -> _Session:
        session = self._sessions.get(name)
        if session is None:
            raise UnknownSession("this runner has no such session")
        return session

    def _current(self, name: str, epoch: int) -> _Session:
        """The session, moved on to ``epoch``; anything older is stale."""
        session = self._find(name)
        if epoch < session.epoch:
            text = f"the session is in epoch {session.epoch}; epoch {epoch} is over"
            raise StateError(text, reason=Reason.STALE_EPOCH)
        if epoch > session.epoch:
            session.epoch = epoch
            self.state.abandon(name)
        return session

    def _stage(self, name: str) -> Stage:
        if name not in self._stages:
            raise UnknownName(f"no stage is called {name!r} here.{nearest(name, self._stages)}")
        return self._stages[name]


def _build(name: str, factory: Factory | str, options: Mapping[str, Scalar], settings: RunnerSettings) -> Stage:
    options = dict(options)
    if settings.device != "cpu":
        options.setdefault("device", settings.device)
    try:
        stage = registry.build(registry.STAGES, factory, options) if isinstance(factory, str) else factory(**options)
    except ConfigError as e:
        raise ConfigError(f"stage {name!r}: {e.text}", reason=e.reason) from e
    except OmniLoopError:
        raise
    except Exception as e:
        raise StageFailed(f"the stage {name!r} cannot be built: {type(e).__name__}: {e}") from e
    if not isinstance(stage, Stage):
        raise InvalidInput(f"the factory of {name!r} made a {type(stage).__name__}, which is no Stage")
    return stage


def _run_one(name: str, stage: Stage, item: StageItem) -> Outputs:
    """Run a batch of one; raises the item's own error, and any other as :class:`StageFailed`."""
    try:
        with torch.no_grad():
            results = stage.run([item])
    except (OmniLoopError, KeyboardInterrupt):
        raise
    except BaseException as e:  # SystemExit too: a model that exits must not take the runner along
        raise _failed(name, e) from e
    if len(results) != 1:
        raise StageFailed(f"stage {name!r} gave {len(results)} results for 1 item", reason=Reason.BAD_OUTPUT)
    result = results[0]
    if isinstance(result, OmniLoopError):
        raise result
    if isinstance(result, BaseException):
        raise _failed(name, result) from result
    if not isinstance(result, Mapping):
        text = f"stage {name!r} gave a {type(result).__name__}, not outputs by name"
        raise StageFailed(text, reason=Reason.BAD_OUTPUT)
    return result


def _failed(name: str, error: BaseException) -> StageFailed:
    """Public text names the kind of error only: a message may hold paths or another session's data."""
    return StageFailed(f"stage {name!r} failed: {type(error).__name__}")


def build(stages: Sequence[StageEntry], connector: Connector, settings: RunnerSettings) -> Runner:
    """A runner that has run every stage once.

    Raises:
        OmniLoopError: what a stage met; anything else than a typed error becomes :class:`StageFailed`.
    """
    try:
        runner = Runner(stages, connector, settings)
        runner.warm_up()
    except OmniLoopError:
        raise
    except BaseException as e:  # SystemExit too: see _run_one
        raise StageFailed(f"the stages cannot be built: {type(e).__name__}: {e}") from e
    return runner


def stage_names(stages: Iterable[StageEntry]) -> frozenset[str]:
    return frozenset(name for name, _, _ in stages)
