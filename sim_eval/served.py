"""What the server that an evaluation starts serves: the suite's deployment, with another checkpoint, or recorded."""

from __future__ import annotations

from pathlib import Path

from omni_loop.config import Deployment, PipelineConfig, RecordConfig, load_deployment
from omni_loop.errors import ConfigError
from omni_loop.record import outcomes

from .runner import Run
from .suite import EvalSuite


def deployment_of(suite: EvalSuite, checkpoint: str = "", record: Path | None = None) -> Deployment:
    """The suite's deployment; ``checkpoint`` instead of the one that its pipeline is made of; recorded to ``record``;
    as many sessions in a batch as the suite says.

    Raises:
        ConfigError: its pipeline is not made of a checkpoint that could be another.
    """
    chosen = load_deployment(suite.deployment)
    if checkpoint:
        made = {p.name: p for p in chosen.pipelines if isinstance(p, PipelineConfig) and "checkpoint" in p.options}
        if suite.pipeline not in made:
            raise ConfigError(
                f"--checkpoint: pipeline {suite.pipeline!r} of the deployment {suite.deployment!r} is not made by a "
                "template from a checkpoint"
            )
        mine = made[suite.pipeline]
        other = mine.model_copy(update={"options": {**mine.options, "checkpoint": checkpoint}})
        pipelines = tuple(other if p is mine else p for p in chosen.pipelines)
        chosen = chosen.model_copy(update={"pipelines": pipelines})
    runners = [r.model_copy(update={"max_batch": min(r.max_batch, suite.batch)}) for r in chosen.runners]
    chosen = chosen.model_copy(update={"runners": tuple(runners)})
    if record is not None:
        chosen = chosen.model_copy(update={"record": RecordConfig(folder=str(record.resolve()))})
    return chosen


def note_outcomes(record: Path, run: Run) -> None:
    """Say beside the recording how its sessions ended, which only the simulator knows."""
    said = {
        r.session: {"success": r.success, "outcome": str(r.outcome), "seed": r.seed, "score": r.score}
        for r in run.results
        if r.session
    }
    outcomes.write(record, said)
