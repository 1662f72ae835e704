"""A runner: it owns stages and their sessions' state, and executes commands on them.

It knows no transport and no order: :class:`~omni_loop.runner.batcher.Batcher` says what runs when, and with whom::

    RunStage -> prepare: get inputs, begin transaction -> stage.run -> complete: check outputs, put them -> receipts
                                        any failure on the way: undo -> nothing staged, nothing put
    Commit / Discard decide the transaction; these and all other commands go through handle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import registry
from ..connect.base import Connector
from ..connect.schema import StageEdges
from ..errors import (
    ConfigError,
    InvalidInput,
    OmniLoopError,
    Reason,
    SnapshotError,
    StageFailed,
    StateError,
    UnknownName,
    UnknownSession,
    nearest,
)
from ..messages import (
    Answer,
    CloseSession,
    Command,
    Commit,
    Discard,
    Done,
    ExportSession,
    ForkSession,
    ImportSession,
    OpenSession,
    PayloadKind,
    Probe,
    Receipt,
    ReleasePayloads,
    ResetSession,
    RewindSession,
    RunStage,
    Scalar,
)
from ..stage import ClosingStage, Outputs, Payload, Stage, StageItem
from .answers import failure
from .ledger import Ledger
from .payloads import NoState, Payloads
from .state import Budget, StateManager

_REVISION = "revision"  # of the stage, in the meta of its exported state
Factory = Callable[..., Stage]
StageEntry = tuple[str, Factory | str, Mapping[str, Scalar]]  # "pipeline/stage", factory or its name, options


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """``threads`` of torch for this runner; ``device`` of its state, and of its stages unless their options say.
    A batch has at most ``max_batch`` sessions and waits up to ``max_wait_ms`` for others that were active lately. A
    stage that finds no room in a pool is tried again for up to ``queue_ms``. ``edges``: schemas by full stage name."""

    threads: int = 1
    device: str = "cpu"
    budget: Budget = field(default_factory=Budget)
    max_batch: int = 16
    max_wait_ms: float = 0.0
    queue_ms: float = 250.0
    edges: Mapping[str, StageEdges] = field(default_factory=dict)


@dataclass(slots=True)
class _Session:
    seed: int
    prompt: str
    epoch: int = 0
    staged: dict[str, int] = field(default_factory=dict)  # stages with something undecided, and its tick
    cost_ms: float = 0.0  # of what is undecided


class Runner:
    """See the module's text. Not thread-safe: one thread builds it, warms it up and feeds it."""

    def __init__(
        self,
        stages: Sequence[StageEntry],
        connector: Connector,
        settings: RunnerSettings = RunnerSettings(),
        ledger: Ledger | None = None,
    ) -> None:
        """``ledger``: shared with other runners of this process; None: this one's own, of the settings' budget."""
        torch.set_num_threads(settings.threads)
        self.connector = connector
        self.settings = settings
        with ExitStack() as built:
            self.stages: dict[str, Stage] = {}
            for name, factory, options in stages:
                self.stages[name] = stage = _build(name, factory, options, settings)
                if isinstance(stage, ClosingStage):
                    built.callback(stage.close)
            specs = {name: stage.state_specs() for name, stage in self.stages.items()}
            self.state = StateManager(specs, settings.budget, settings.device, ledger)
            self._resources = built.pop_all()
        self._stateless = frozenset(name for name, spec in specs.items() if not spec)
        self._payloads = Payloads(connector, self.state, settings.edges)
        self.undecided: set[str] = set()  # sessions with something staged
        self._sessions: dict[str, _Session] = {}
        self._handlers: dict[type, Callable[[Any], Done]] = {
            OpenSession: self._open,
            RunStage: self._nowhere,
            Commit: self._commit,
            Discard: self._discard,
            ResetSession: self._reset,
            ForkSession: self._fork,
            RewindSession: self._rewind,
            ExportSession: self._export,
            ImportSession: self._import,
            CloseSession: self._close,
            ReleasePayloads: self._release,
            Probe: self._payloads.probe,
        }

    @property
    def revisions(self) -> dict[str, str]:
        """Of the stages, by full name."""
        return {name: str(stage.revision) for name, stage in self.stages.items()}

    def warm_up(self) -> None:
        """One forward pass of every stage. Raises typed errors as a stage does, others as StageFailed naming it."""
        with torch.no_grad():
            for name, stage in self.stages.items():
                try:
                    stage.warm_up()
                except OmniLoopError:
                    raise
                except Exception as e:
                    raise StageFailed(f"the stage {name!r} cannot warm up: {type(e).__name__}: {e}") from e

    def handle(self, request: int, command: Command, queue_ms: float = 0.0) -> Answer:
        """Execute one command that runs no stage; whatever goes wrong is a :class:`Failed`."""
        try:
            done = self._handlers[type(command)](command)
            return Done(request, done.outputs, 0.0, queue_ms, used=done.used)
        except Exception as e:
            return failure(request, command, e)

    def prepare(self, command: RunStage) -> StageItem:
        """Get the inputs and open the stage's transaction, which a run on a part has none of: :meth:`complete` or
        :meth:`undo` must follow. Raises when nothing was opened."""
        session = self._current(command.session, command.epoch)
        if command.part and command.stage not in self._stateless:
            raise InvalidInput(f"stage {command.stage!r} has state, so that it cannot run on parts of its input")
        inputs = self._payloads.inputs(command)
        return StageItem(
            session=command.session,
            seed=session.seed,
            epoch=command.epoch,
            tick=command.tick,
            op=command.op,
            step=command.step,
            prompt=session.prompt,
            inputs=inputs,
            params=command.params,
            state=NoState() if command.part else self.state.begin(command.session, command.stage, command.tick),
        )

    def complete(self, command: RunStage, outputs: Outputs, cost_ms: float) -> dict[str, Receipt]:
        """Seal what the stage staged and put its outputs. ``cost_ms`` is the item's share of the forward passes'
        time. After a failure :meth:`undo` must follow."""
        if command.part:
            return self.publish(command, outputs, command.part)
        self.state.seal(command.session, command.stage)
        receipts = self.publish(command, outputs)
        session = self._sessions[command.session]
        session.staged[command.stage] = command.tick
        session.cost_ms += cost_ms
        self.undecided.add(command.session)
        return receipts

    def publish(self, command: RunStage, outputs: Outputs, part: int = 0) -> dict[str, Receipt]:
        """Put outputs, or a ``part`` of what they will be. Raises StageFailed (BAD_OUTPUT) for what is not as the
        edges it leaves by say."""
        return self._payloads.publish(command, outputs, part)

    def undo(self, command: RunStage) -> None:
        """Leave no trace of the command's tick in its stage."""
        if command.part:
            return
        self.state.discard(command.session, command.tick, (command.stage,))
        self._decided(command.session, command.tick, (command.stage,))

    def continues(self, command: RunStage) -> bool:
        """Whether the stage has something staged that this run would go on from: then it cannot run twice."""
        session = self._sessions.get(command.session)
        return session is not None and command.stage in session.staged

    def close(self) -> None:
        """Close every session, and the stages that hold more than memory. Raises PoolCorrupt when the books do not
        balance then."""
        with self._resources:
            for session in self.state.sessions():
                self._close(CloseSession(session))
            self.state.check()

    def _open(self, command: OpenSession) -> Done:
        self.state.open(command.session, command.stages)
        self._sessions[command.session] = _Session(command.seed, command.prompt)
        return Done(0)

    def _commit(self, command: Commit) -> Done:
        session = self._current(command.session, command.epoch)
        self.state.commit(
            command.session, command.tick, command.stages, command.epoch, command.recomputable, session.cost_ms
        )
        session.cost_ms = 0.0
        self._decided(command.session, command.tick, command.stages)
        return Done(0)

    def _discard(self, command: Discard) -> Done:
        session = self._find(command.session)
        # A reset has discarded what older epochs staged, and evicted state can have nothing staged.
        if command.epoch >= session.epoch and session.staged:
            self.state.discard(command.session, command.tick, command.stages)
            self._decided(command.session, command.tick, command.stages)
        return Done(0)

    def _reset(self, command: ResetSession) -> Done:
        session = self._not_over(command.session, command.epoch)
        self.state.reset(command.session, command.epoch)
        self._move_on(command.session, command.epoch)
        session.seed = session.seed if command.seed is None else command.seed
        session.prompt = session.prompt if command.prompt is None else command.prompt
        return Done(0)

    def _fork(self, command: ForkSession) -> Done:
        parent = self._find(command.session)
        self.state.fork(command.session, command.child)
        seed = parent.seed if command.seed is None else command.seed
        self._sessions[command.child] = _Session(seed, parent.prompt, parent.epoch)
        return Done(0)

    def _rewind(self, command: RewindSession) -> Done:
        self._not_over(command.session, command.epoch)
        self.state.rewind(command.session, command.to_epoch, command.to_tick)
        self._move_on(command.session, command.epoch)  # only now: a refused rewind changes nothing
        return Done(0)

    def _export(self, command: ExportSession) -> Done:
        session = self._find(command.session)
        payloads = {}
        for stage, (arrays, meta) in self.state.export(command.session).items():
            known = {**meta, _REVISION: self.stages[stage].revision}
            payloads[stage] = (f"{stage}.state", Payload(PayloadKind.STATE, arrays, known))
        epoch = max(session.epoch, command.epoch)  # connectors refuse payloads of an older one
        return Done(0, self._payloads.put_all(payloads, command.session, epoch, -1))

    def _import(self, command: ImportSession) -> Done:
        states = {}
        for stage, receipt in command.stages.items():
            payload = self.connector.get(receipt)
            meta = dict(payload.meta)
            revision, mine = meta.pop(_REVISION, ""), self._stage(stage).revision
            if revision != mine:
                raise SnapshotError(f"the state of {stage!r} is of revision {revision!r}; this server has {mine!r}")
            states[stage] = (payload.arrays, meta)
        self.state.import_(command.session, states, command.epoch)
        self._sessions[command.session] = _Session(command.seed, command.prompt, command.epoch)
        self.undecided.discard(command.session)
        return Done(0)

    def _close(self, command: CloseSession) -> Done:
        self._find(command.session)
        self.state.close(command.session)
        del self._sessions[command.session]
        self.undecided.discard(command.session)
        self.connector.cleanup_session(command.session)
        return Done(0)

    def _release(self, command: ReleasePayloads) -> Done:
        for key in command.keys:
            self.connector.cleanup(key)
        return Done(0)

    def _nowhere(self, command: RunStage) -> Done:
        """A stage this runner does not have, or one of a session it does not have."""
        self._current(command.session, command.epoch)
        self._stage(command.stage)
        raise StageFailed(f"stage {command.stage!r} runs only in a batch")

    def _decided(self, name: str, tick: int, stages: Iterable[str]) -> None:
        """Nothing of ``tick`` is staged any more in ``stages``."""
        session = self._sessions[name]
        for stage in stages:
            if session.staged.get(stage) == tick:
                del session.staged[stage]
        if not session.staged:
            session.cost_ms = 0.0
            self.undecided.discard(name)

    def _find(self, name: str) -> _Session:
        session = self._sessions.get(name)
        if session is None:
            raise UnknownSession("this runner has no such session")
        return session

    def _not_over(self, name: str, epoch: int) -> _Session:
        """The session, unless ``epoch`` is older than its own."""
        session = self._find(name)
        if epoch < session.epoch:
            text = f"the session is in epoch {session.epoch}; epoch {epoch} is over"
            raise StateError(text, reason=Reason.STALE_EPOCH)
        return session

    def _current(self, name: str, epoch: int) -> _Session:
        """The session, moved on to ``epoch``; anything older is stale."""
        session = self._not_over(name, epoch)
        if epoch > session.epoch:
            self.state.abandon(name)
            self._move_on(name, epoch)
        return session

    def _move_on(self, name: str, epoch: int) -> None:
        """The session is in ``epoch`` with nothing staged."""
        session = self._sessions[name]
        session.epoch, session.cost_ms = epoch, 0.0
        session.staged.clear()
        self.undecided.discard(name)

    def _stage(self, name: str) -> Stage:
        if name not in self.stages:
            raise UnknownName(f"no stage is called {name!r} here.{nearest(name, self.stages)}")
        return self.stages[name]


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


def build(
    stages: Sequence[StageEntry], connector: Connector, settings: RunnerSettings, ledger: Ledger | None = None
) -> Runner:
    """A runner that has run every stage once.

    Raises:
        OmniLoopError: what a stage met; anything else than a typed error becomes :class:`StageFailed`.
    """
    try:
        runner = Runner(stages, connector, settings, ledger)
        try:
            runner.warm_up()
        except BaseException:
            runner.close()
            raise
    except OmniLoopError:
        raise
    except BaseException as e:  # SystemExit too: a model that exits must not take the runner along
        raise StageFailed(f"the stages cannot be built: {type(e).__name__}: {e}") from e
    return runner


def stage_names(stages: Iterable[StageEntry]) -> frozenset[str]:
    return frozenset(name for name, _, _ in stages)
