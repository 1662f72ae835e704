"""The work of ``omni-loop check config``: all that can be known of deployments without building a stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec

from rich.console import Console
from rich.markup import escape

from .. import registry
from ..config import Deployment, PipelineConfig, load_deployment, shipped
from ..errors import CheckpointError, ConfigError, MissingExtra, OmniLoopError, nearest
from ..loop.edges import choose, routes_of
from ..loop.graph import CompiledPipeline, compile_pipeline
from ..loop.pipeline import StageDef, load_pipeline
from ..messages import Scalar
from .steps import Steps, absent, say_machine


def check_config(deployments: Sequence[str], console: Console) -> bool:
    """Check each of ``deployments`` (none: everything shipped); True when nothing is wrong. Weights that are not on
    this machine are no mistake of a deployment; a missing extra is none of one that nobody named."""
    say_machine(console)
    good = True
    for name in deployments or shipped("serve"):
        console.print(f"[bold]{escape(name)}[/bold]", highlight=False)
        steps = Steps(console, (CheckpointError, *absent(not deployments)))
        deployment = steps.step("configuration", partial(load_deployment, name))
        if deployment is not None:
            check_access(deployment, steps)
            check_graphs(deployment, steps)
        good &= steps.good
    return good


def check_access(deployment: Deployment, steps: Steps) -> None:
    """The files of tokens and TLS: there, of use, and secrets readable by their owner alone."""
    from ..serve import tls
    from ..serve.tokens import read_tokens

    access = deployment.access
    if access.tokens is not None:
        tokens = access.tokens
        found = steps.step("tokens", lambda: read_tokens(tokens), lambda t: f"of {', '.join(sorted(t.principals))}")
        if found is not None:
            steps.step("quotas", lambda: check_quotas(access.quotas, found.principals))
    if access.tls is not None:
        pair = access.tls
        steps.step("TLS", lambda: tls.until(pair), lambda end: f"until {end}")


def check_quotas(quotas: Iterable[str], principals: Iterable[str]) -> None:
    """Raises :class:`ConfigError` for a quota of a principal that no token names."""
    known = set(principals)
    for name in quotas:
        if name not in known:
            raise ConfigError(f"access.quotas: no token is of {name!r}.{nearest(name, known)}")


def check_graphs(deployment: Deployment, steps: Steps) -> None:
    """Pipelines and their specs, options of every stage, placement, and the connectors of edges."""
    stages: dict[str, StageDef] = {}
    graphs: list[CompiledPipeline] = []
    for name, named in zip(deployment.names, deployment.pipelines, strict=True):
        compiled = steps.step(f"pipeline {name}", partial(compiled_of, named), shown)
        if compiled is not None:
            stages |= zip(compiled.stages, compiled.pipeline.stages, strict=True)
            graphs.append(compiled)
    whole = steps.complete  # else stages are missing, and what is said of them cannot be judged
    for full, stage in stages.items():
        steps.step(
            f"options of {full}",
            partial(check_factory, stage.factory, options_of(stage, deployment)),
        )
    if whole:
        steps.step("stage options", lambda: check_options(deployment, stages.values()))
        steps.step(
            "placement", lambda: placed(deployment, stages), lambda p: f"on {', '.join(sorted(set(p.values())))}"
        )
        if steps.complete:
            steps.step("connectors", lambda: routes_of(choose(deployment, graphs), graphs))
    check_packages(stages, steps)


def check_packages(stages: Mapping[str, StageDef], steps: Steps) -> None:
    """Packages that a stage's factory says (``needs``, names of modules) it imports when it is built."""
    for full, stage in stages.items():
        with suppress(OmniLoopError):  # which the step of its options has said
            if needs := getattr(registry.load(registry.STAGES, stage.factory), "needs", ()):
                steps.step(f"packages of {full}", partial(find_packages, needs), forgiven=(MissingExtra,))


def find_packages(modules: Iterable[str]) -> None:
    """Raises :class:`MissingExtra` for a module that is not installed; imports none."""
    for module in modules:
        if find_spec(module) is None:
            extra = registry.extra_of(module)
            wanted = f"{extra} (uv sync --inexact --extra {extra})" if extra else f"{module} is not installed"
            raise MissingExtra(wanted)


def compiled_of(named: str | PipelineConfig) -> CompiledPipeline:
    return compile_pipeline(load_pipeline(named))


def shown(compiled: CompiledPipeline) -> str:
    return f"({', '.join(f'{stage.name}: {stage.kind}' for stage in compiled.pipeline.stages)})"


def placed(deployment: Deployment, stages: Iterable[str]) -> dict[str, str]:
    """See :meth:`Deployment.place <omni_loop.config.Deployment.place>`; a runner without stages is a ConfigError."""
    found = deployment.place(stages)
    if idle := [runner.name for runner in deployment.runners if runner.name not in found.values()]:
        raise ConfigError(f"runner {idle[0]!r} has no stage left to run; leave it out")
    return found


def check_factory(factory: str, options: Mapping[str, Scalar]) -> None:
    """Options of the right names and types; a factory that knows more of them says so in ``check_options``."""
    found = registry.factory(registry.STAGES, factory, options)
    if check := getattr(found, "check_options", None):
        check(**options)


def options_of(stage: StageDef, deployment: Deployment, device: str = "cpu") -> dict[str, Scalar]:
    """What the stage's factory will be called with on a runner of ``device``."""
    options = {**stage.options, **deployment.stage_options.get(stage.factory, {})}
    if device != "cpu":
        options.setdefault("device", device)
    return options


def check_options(deployment: Deployment, stages: Iterable[StageDef]) -> None:
    """Raises :class:`ConfigError` when the deployment gives options to a stage factory nobody uses."""
    used = {stage.factory for stage in stages}
    for factory in deployment.stage_options:
        if factory not in used:
            raise ConfigError(f"stage_options: no stage here is made by {factory!r}.{nearest(factory, used)}")
