"""Row B5: what a deployment must not say is refused by name, and the admin port answers whatever is asked of it."""

from __future__ import annotations

import asyncio
import copy
import random
import string
from collections.abc import Iterable, Iterator
from typing import Any

import yaml
from pydantic import BaseModel

from ...config import Deployment
from ...endpoints import AdminEndpoint
from ...errors import ConfigError
from ...serve.admin import start
from ...strict import location, parse, validate
from ..board import NotRun, expect
from .served import served

Path = tuple[int | str, ...]
# A deployment that names every section there is.
COMPLETE: dict[str, Any] = {
    "pipelines": [{"name": "a", "template": "t"}],
    "runners": [{"name": "main"}],
    "access": {"tls": {"certificate": "/c", "key": "/k"}, "quota": {}, "quotas": {"ann": {}}},
    "endpoints": {"openpi": {"pipeline": "a"}, "lerobot": {"models": {"m": "a"}}, "admin": {}},
    **{name: {} for name in ("listen", "pools", "limits", "session", "snapshots", "record")},
}
# By the names of JSON Schema.
VALUES: dict[str, Any] = {
    "null": None,
    "boolean": True,
    "integer": 3,
    "number": 2.5,
    "string": "some text",
    "array": [[1]],
    "object": {"k": [1]},
}


def measure(seed: int, full: bool) -> float:
    """Things refused, and answers of the admin port."""
    rng = random.Random(seed)
    expect(not _problems(COMPLETE), f"the deployment that names every section is refused: {_problems(COMPLETE)}")
    refused = 0
    for path, kind in sections():
        for wrong, where in (*_misspelled(rng, path, kind, 20 if full else 3), *_of_wrong_type(path, kind)):
            text = _problems(wrong)
            expect(text.startswith("x.yaml: "), f"seed {seed}: {where}: not refused: {text!r}")
            expect(where in text, f"seed {seed}: {where} is not named: {text!r}")
            refused += 1
    return refused + asyncio.run(_admin(seed, 300 if full else 10))


def sections(value: Any = None, path: Path = ()) -> Iterator[tuple[Path, type[BaseModel]]]:
    """Where each section stands in :data:`COMPLETE`, and what it may say."""
    value = Deployment.model_validate(COMPLETE) if value is None else value
    inside: Iterable[tuple[int | str, Any]] = ()
    if isinstance(value, BaseModel):
        yield path, type(value)
        inside = value
    elif isinstance(value, dict):
        inside = value.items()
    elif isinstance(value, tuple):
        inside = enumerate(value)
    for name, found in inside:
        if found is not None:
            yield from sections(found, (*path, name))


def _allowed(schema: dict[str, Any], whole: dict[str, Any]) -> set[str]:
    """Types of JSON that ``schema`` takes."""
    if "$ref" in schema:
        return _allowed(whole["$defs"][schema["$ref"].rsplit("/", 1)[1]], whole)
    choices = (*schema.get("anyOf", ()), *schema.get("oneOf", ()))
    if choices:
        return set().union(*(_allowed(one, whole) for one in choices))
    kind = schema.get("type", "string")
    return {"number", "integer"} if kind == "number" else {kind}


def _put(path: Path, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(COMPLETE)
    at: Any = changed
    for part in path[:-1]:
        at = at[part]
    at[path[-1]] = value
    return changed


def _misspelled(
    rng: random.Random, path: Path, kind: type[BaseModel], count: int
) -> Iterator[tuple[dict[str, Any], str]]:
    for name in rng.choices(sorted(kind.model_fields), k=count):
        at = rng.randrange(len(name))
        wrong = name[:at] + rng.choice(string.ascii_lowercase) + name[at + rng.randrange(2) :]
        if wrong not in kind.model_fields:
            yield _put((*path, wrong), 1), f"unknown key '{location((*path, wrong))}'"


def _of_wrong_type(path: Path, kind: type[BaseModel]) -> Iterator[tuple[dict[str, Any], str]]:
    schema = kind.model_json_schema()
    for name, field in schema["properties"].items():
        for of in VALUES.keys() - _allowed(field, schema):
            yield _put((*path, name), VALUES[of]), location((*path, name))


def _problems(data: dict[str, Any]) -> str:
    """As it would be said of a file; "" for what is taken."""
    try:
        validate(Deployment, parse(yaml.safe_dump(data), "x.yaml"), "x.yaml")
    except ConfigError as error:
        return error.text
    return ""


async def _admin(seed: int, examples: int) -> int:
    async with served() as up:
        admin = await start(AdminEndpoint(port=0), up.server.service)
        try:
            tried, failures = await asyncio.to_thread(admin_failures, f"http://{admin.address}", examples, seed)
        finally:
            await admin.stop(1.0)
    expect(not failures, f"seed {seed}: {failures}")
    return tried


def admin_failures(url: str, examples: int, seed: int = 0) -> tuple[int, list[str]]:
    """Schemathesis over the OpenAPI at ``url``: how many requests were answered, and what the schema does not allow.
    ``examples``: of each route, good and bad ones each. Raises :class:`~omni_loop.testing.board.NotRun` without it."""
    try:
        import schemathesis
        from schemathesis.core.result import Ok
    except ModuleNotFoundError:
        raise NotRun("schemathesis is not installed") from None
    import hypothesis

    tried, failures = 0, list[str]()
    settings = hypothesis.settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    for found in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        if not isinstance(found, Ok):
            failures.append(str(found.err()))
            continue
        operation = found.ok()
        modes = [schemathesis.GenerationMode.POSITIVE]
        if any(True for _ in operation.iter_parameters()):
            modes.append(schemathesis.GenerationMode.NEGATIVE)
        for mode in modes:

            @hypothesis.seed(seed)
            @settings
            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            def check(case: Any) -> None:
                nonlocal tried
                case.call_and_validate(base_url=url, timeout=30)
                tried += 1

            try:
                check()
            except Exception as failure:  # of any kind: it is a finding, with the request that shows it
                failures.append(f"{operation.label}: {type(failure).__name__}: {failure}"[:2000])
    return tried, failures
