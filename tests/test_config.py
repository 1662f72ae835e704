from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from omni_loop import registry, strict
from omni_loop.config import Deployment, Limits, RunnerConfig, SessionConfig, load_deployment, parse, shipped, validate
from omni_loop.errors import ConfigError, OmniLoopError, UnknownName
from omni_loop.wire.limits import Limits as WireLimits

ONE: dict[str, Any] = {"pipelines": ["p"]}


@pytest.mark.parametrize("name", shipped("serve"))
def test_shipped_deployments_are_valid_and_name_registered_pipelines(name: str) -> None:
    for named in load_deployment(name).pipelines:
        if isinstance(named, str):
            assert named in registry.names(registry.PIPELINES)
        else:
            assert named.template in registry.names(registry.TEMPLATES)


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"limit": {}}, "unknown key 'limit'. Did you mean 'limits'?"),
        ({"limits": {"max_session": 3}}, "unknown key 'limits.max_session'. Did you mean 'max_sessions'?"),
        ({"runners": [{"name": "a", "thread": 2}]}, "unknown key 'runners[0].thread'. Did you mean 'threads'?"),
        ({"runners": [{"name": "a", "threads": "2"}]}, "runners[0].threads: Input should be a valid integer"),
        ({"runners": [{"name": "a", "placement": "proces"}]}, "runners[0].placement: Input should be 'thread'"),
        ({"runners": []}, "at least one must be named"),
        (
            {"pipelines": [{"name": "a", "templat": "t"}]},
            "unknown key 'pipelines[0].templat'. Did you mean 'template'?",
        ),
        ({"pipelines": [{"name": "a"}]}, "pipelines[0].template: Field required"),
        (
            {"pipelines": [{"name": "../../../x y\n", "template": "t"}]},
            "pipelines[0].name: '../../../x y\\n' is no name: 1 to 100 ASCII letters, digits",
        ),
        ({"pipelines": [{"name": "x" * 101, "template": "t"}]}, "is no name: "),
        ({"pipelines": [{"name": "a\n", "template": "t"}]}, "is no name: "),
        ({"pipelines": [{"name": "..", "template": "t"}]}, "is no name: "),
        ({"pipelines": [{"name": "", "template": "t"}]}, "is no name: "),
        (
            {"pipelines": [{"name": "a", "template": "t", "options": {"checkpoint": "a\0b"}}]},
            "pipelines[0].options: checkpoint holds the character NUL",
        ),
        ({"stage_options": {"act": {"checkpoints": "a\0b"}}}, "act.checkpoints holds the character NUL"),
        ({"stage_options": {"act": {"checkpoints": "a" * 20_000}}}, "has 20000 characters; at most"),
        ({"record": {"folder": "a\0b"}}, "record.folder: 'a\\x00b' is no path of a folder"),
        ({"record": {"folder": ""}}, "record.folder: '' is no path of a folder"),
        ({"record": {"folder": "x" * 5000}}, "is no path of a folder"),
        ({"record": {"folder": "~nosuchuser/x"}}, "record.folder: '~nosuchuser/x': '~' is not expanded here"),
        ({"snapshots": {"folder": "a\0b"}}, "snapshots.folder: 'a\\x00b' is no path of a folder"),
        ({"pipelines": [3]}, "pipelines[0]: Input should be a valid string"),
        ({"pipelines": ["a", {"name": "a", "template": "t"}]}, "pipeline 'a' is named twice"),
        ({"pipelines": ["p", "p"]}, "pipeline 'p' is named twice"),
        ({"runners": [{"name": "a"}, {"name": "a"}]}, "runner 'a' is named twice"),
        ({"listen": {"host": "0.0.0.0"}}, "listen: others can reach '0.0.0.0'"),
        ({"listen": {"port": 65536}}, "listen.port: Input should be less than or equal to 65535"),
        ({"stage_options": {"act": {"steps": [1]}}}, "stage_options.act.steps: wanted text, a number or true/false"),
        ({"runners": [{"name": "a", "placement": "process", "connector": "local"}]}, "does not leave a process"),
    ],
)
def test_what_is_wrong_is_named_with_the_nearest_right(extra: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(Deployment, ONE | extra, "x.yaml")
    assert caught.value.text.startswith("x.yaml: ")
    assert text in caught.value.text


def test_several_mistakes_are_told_together() -> None:
    with pytest.raises(ConfigError, match=r"'lisen'.*'runers'"):
        validate(Deployment, ONE | {"lisen": {}, "runers": []}, "x")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a: 1\na: 2", "'a' stands twice"),
        ("a: [1\nb: 2", r"\(line 2\)"),
        ("- a", "wanted keys and values, not list"),
        ("", "is empty"),
        ("# nothing\n---\n", "is empty"),
        ("a: " + "[" * 3000, "nested too deeply"),
        ("a: 2026-13-45", "not YAML"),
        ("a: \x00", "not YAML"),
        ("a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    ],
)
def test_bad_yaml_is_refused(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=f"^f: .*{error}"):
        parse(text, "f")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("listen: 2026-01-01", "f: listen: wanted text, a number, true/false, a list or keys, not a date"),
        ("runners: [{name: a}, {name: 2026-01-01 10:00:00}]", r"f: runners\[1\].name: wanted .*, not a datetime"),
        ("stage_options: {act: {at: !!binary aGk=}}", "f: stage_options.act.at: wanted .*, not a bytes"),
        ("stage_options: {2026-01-01: {}}", "f: stage_options: the key '2026-01-01' is a date; wanted text"),
    ],
)
def test_values_json_does_not_know_are_refused_by_their_key(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        validate(Deployment, parse(f"pipelines: [p]\n{text}", "f"), "f")


def bomb(levels: int, wide: int) -> str:
    lines = ["l0: &l0 [x]"]
    lines += [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * wide)}]" for i in range(1, levels + 1)]
    return "\n".join(lines)


@pytest.mark.parametrize(("levels", "wide"), [(9, 10), (60, 2), (2, 200), (1, 10_000)])
def test_aliases_that_multiply_are_refused_by_the_line(levels: int, wide: int) -> None:
    with pytest.raises(ConfigError, match=rf"^f: more than {strict.MAX_NODES} values.* \(line \d+\)"):
        parse(bomb(levels, wide), "f")


@pytest.mark.parametrize(
    "text", ["a: {k: &m {x: 1}, " + ", ".join(f"k{i}: *m" for i in range(4000)) + "}", "a: [" + "1," * 10_001 + "]"]
)
def test_more_values_than_any_file_has(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^f: more than {strict.MAX_NODES} values"):
        parse(text, "f")


def test_a_text_longer_than_any_file_is_not_read() -> None:
    with pytest.raises(ConfigError, match=f"^f: {strict.MAX_TEXT + 1} characters; at most {strict.MAX_TEXT} are read"):
        parse("#" * (strict.MAX_TEXT + 1), "f")


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: &a {b: [*a]}", "a: &a {*a : 1}"])
def test_an_alias_within_itself_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^f: an alias stands within what it stands for \(line 1\)"):
        parse(text, "f")


def test_a_few_aliases_are_fine() -> None:
    assert parse("a: &a [1, 2]\nb: [*a, *a]\nc: *a", "f") == {"a": [1, 2], "b": [[1, 2], [1, 2]], "c": [1, 2]}


@pytest.mark.parametrize(("text", "error"), [("? [1]\n: 2", "unhashable"), ("? [[1]]\n: 2", "unhashable")])
def test_keys_that_cannot_be_keys(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=f"^f: .*{error}"):
        parse(text, "f")


@pytest.mark.parametrize("text", ["&a [*a]", "[" * 200 + "]" * 200])
def test_what_contains_itself_or_is_very_deep_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^f: "):
        validate(Deployment, parse(f"pipelines: {text}", "f"), "f")


def test_a_file_is_read_by_path_and_a_shipped_one_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("pipelines: [p]\nlisten: {port: 7}\n")
    assert load_deployment(path).listen.port == 7
    assert load_deployment(str(path)) == load_deployment(path)
    with pytest.raises(UnknownName, match=r"no shipped deployment is called 'push'\. Did you mean 'pusht'\?"):
        load_deployment("push")
    with pytest.raises(ConfigError, match="No such file"):
        load_deployment(tmp_path / "none.yaml")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_deployment(path)


def deployment(**runners: list[str]) -> Deployment:
    return Deployment(
        pipelines=("p",), runners=tuple(RunnerConfig(name=n, stages=tuple(s)) for n, s in runners.items())
    )


def test_a_file_beside_is_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("pipelines: [toy]")
    with pytest.raises(UnknownName, match=r"called 'mine'\. There is a file of that name: say mine\.yaml"):
        load_deployment("mine")
    with pytest.raises(UnknownName, match=r"called 'x{100}\.\.\.'"):
        load_deployment("x" * 5000)
    with pytest.raises(ConfigError, match="cannot read"):
        load_deployment("a\0b.yaml")


def test_placement_gives_every_stage_one_runner() -> None:
    stages = ["p/context", "p/act", "p/frames"]
    assert deployment(a=["*"], b=["p/frames"]).place(stages) == {"p/frames": "b", "p/context": "a", "p/act": "a"}
    assert set(deployment(a=["*"]).place(stages).values()) == {"a"}


@pytest.mark.parametrize(
    ("runners", "text"),
    [
        ({"a": ["p/fraems", "*"]}, r"no stage is called 'p/fraems'\. Did you mean 'p/frames'\?"),
        ({"a": ["p/act"], "b": ["p/act", "*"]}, "'p/act' is in runners 'a' and 'b'"),
        ({"a": ["*"], "b": ["*"]}, r"both take '\*'"),
        ({"a": ["p/act"]}, "no runner takes the stage 'p/frames'"),
    ],
)
def test_wrong_placements_are_refused(runners: dict[str, list[str]], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        deployment(**runners).place(["p/act", "p/frames"])


def test_limits_are_those_of_the_wire() -> None:
    published = asdict(WireLimits())
    published.pop("min_ping_s")  # of gRPC's settings
    session = {name: value for name, value in SessionConfig().model_dump().items() if name in published}
    assert Limits().model_dump() | session == published


@pytest.mark.parametrize("folder", ["serve", "eval", "train"])
def test_every_kind_of_file_has_shipped_ones(folder: str) -> None:
    assert shipped(folder)


def test_errors_are_typed() -> None:
    assert issubclass(ConfigError, OmniLoopError)


@pytest.mark.parametrize("name", Limits.model_fields)
def test_every_limit_has_an_upper_bound(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"limits\.{name}: Input should be less than or equal to"):
        validate(Deployment, ONE | {"limits": {name: 99_999_999_999_999}}, "x")


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("session", "idle_ttl_s", float("inf")),
        ("session", "idle_ttl_s", float("nan")),
        ("session", "idle_ttl_s", 1e300),
        ("session", "max_waiting", 1 << 40),
        ("pools", "budget_bytes", 1 << 63),
        ("pools", "blocks", 1 << 31),
    ],
)
def test_what_no_consumer_takes_is_refused(section: str, key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.{key}: Input should be"):
        validate(Deployment, ONE | {section: {key: value}}, "x")


@pytest.mark.parametrize("value", [1 << 63, -(1 << 63) - 1])
def test_an_option_is_a_number_that_travels(value: int) -> None:
    with pytest.raises(ConfigError, match=r"stage_options: act\.steps does not fit 64 bits"):
        validate(Deployment, ONE | {"stage_options": {"act": {"steps": value}}}, "x")


def test_threads_are_bounded() -> None:
    with pytest.raises(ConfigError, match=r"runners\[0\]\.threads: Input should be less"):
        validate(Deployment, ONE | {"runners": [{"name": "a", "threads": 1 << 40}]}, "x")
