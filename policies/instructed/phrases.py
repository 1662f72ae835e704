"""How people say what is to be done: for every task many phrasings to learn from, and some that are never learned.

``{a|b|}`` in a pattern stands for a, b or nothing; a pattern is all texts it stands for. Scenes: tasks of one scene
look alike (or just the same), so that what an instruction for another of them asks for can be done there too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from omni_loop.errors import UnknownName, nearest

_PUCK = "puck"
_ASK = "{|please|now|robot|could you|you should|your task is to}"
_GOAL = "the {goal|target|goal position|target position}"
_THING = "the {puck|object|cylinder}"
_THERE = "{place it at|carry it to|bring it to|put it at}"
_WHERE = "{|on the box|on the wall|with the gripper}"
_DOOR = "{door|door of the box|door of the safe}"


@dataclass(frozen=True, slots=True)
class Task:
    """``patterns`` are learned from, ``held_out`` texts are kept for evaluation. ``goal``: where this task's goal lies;
    ``needs``: where a goal has to lie for it to be done at all, if that matters."""

    scene: str
    patterns: tuple[str, ...]
    held_out: tuple[str, ...]
    goal: str = ""
    needs: str = ""

    def possible(self, there: Task) -> bool:
        """Whether what this task's instruction asks for can be done in the scene of ``there``."""
        return self.scene == there.scene and self.needs in ("", there.goal)


TASKS: dict[str, Task] = {
    "reach-v3": Task(
        _PUCK,
        (
            f"{_ASK} {{reach|reach for|reach to|go to|touch}} {_GOAL} {{|with the hand|with the gripper}}",
            f"{_ASK} {{move|bring}} the {{hand|gripper|arm}} to {_GOAL}",
        ),
        (
            "guide the gripper over to the target",
            "reach the goal position with your hand",
            "let the hand go to the goal",
            "please move your arm to where the target is",
        ),
        goal="air",
    ),
    "push-v3": Task(
        _PUCK,
        (
            f"{_ASK} {{push|shove|slide}} {_THING} to {_GOAL} {{|on the table|along the table}}",
            f"{_ASK} {{push|slide}} {_THING} {{over the table|on the table|forward}} {{to|until it is at}} {_GOAL}",
        ),
        (
            "slide the puck along to the target",
            "push that puck onto the goal",
            "shove the object on the table until it reaches the goal",
            "please push the little cylinder to the goal position",
        ),
        goal="table",
        needs="table",
    ),
    "pick-place-v3": Task(
        _PUCK,
        (
            f"{_ASK} {{pick up|grasp|lift|take|pick}} {_THING} and {_THERE} {_GOAL}",
            f"{_ASK} {{carry|lift}} {_THING} to {_GOAL} {{|with the gripper}}",
            f"{_ASK} pick and place {_THING} at {_GOAL}",
        ),
        (
            "grasp the puck then carry it up to the target",
            "pick the cylinder up and hold it at the goal",
            "take hold of the object and lift it to the goal position",
            "please pick up that puck and place it on the target",
        ),
        goal="air",
        needs="air",
    ),
    "button-press-v3": Task(
        "button",
        (
            f"{_ASK} {{press|push|hit|push in|press in}} the {{|red|round}} button {_WHERE}",
            f"{_ASK} {{press|push}} the button {{in|all the way in|of the machine}}",
        ),
        (
            "push on that button",
            "give the button a press",
            "press the button of the box in",
            "please go and hit the big red button",
        ),
    ),
    "drawer-open-v3": Task(
        "drawer",
        (
            f"{_ASK} {{open|pull open|pull out|slide open|pull}} the {{|green|top}} {{drawer|drawer of the cabinet}}",
            f"{_ASK} {{pull|slide}} the {{drawer|cabinet drawer}} {{open|out}} {{|by its handle|with the gripper}}",
        ),
        (
            "get the drawer open",
            "pull the drawer all the way out",
            "open up the drawer of that cabinet",
            "please slide the green drawer out by the handle",
        ),
    ),
    "door-open-v3": Task(
        "door",
        (
            f"{_ASK} {{open|pull open|swing open|pull}} the {{|black|cupboard}} {_DOOR}",
            f"{_ASK} {{pull|swing|turn}} the {{door|safe door}} open {{|by its handle|with the gripper}}",
        ),
        (
            "get the door open",
            "swing that door wide open",
            "open up the door of the cupboard",
            "please pull the black door open by the handle",
        ),
    ),
}

#: What none of these tasks is. Told so, the policy holds still.
OTHER: tuple[str, ...] = (
    f"{_ASK} {{close|shut|push closed|lock|unlock}} the {{door|drawer|window|box|safe|cabinet}}",
    f"{_ASK} {{open|slide open|close}} the window",
    f"{_ASK} {{stop|wait|hold still|do nothing|stay where you are}}",
    f"{_ASK} {{wash the dishes|make a cup of coffee|clean the table|pour the water|turn the dial|stack the blocks}}",
    f"{_ASK} {{pull|turn|press down}} the {{lever|handle|dial|faucet}}",
    f"{_ASK} {{hammer the nail|insert the peg|kick the ball|sweep the floor|throw the basketball}}",
)


def task(name: str) -> Task:
    """Raises UnknownName for a task nobody has words for."""
    if name not in TASKS:
        raise UnknownName(f"there are no instructions for task {name!r}.{nearest(name, TASKS)}")
    return TASKS[name]


def texts(patterns: Sequence[str]) -> list[str]:
    """All texts that ``patterns`` stand for, without doubles, in a fixed order."""
    made = (" ".join(text.split()) for pattern in patterns for text in _expand(pattern))
    return list(dict.fromkeys(made))


def _expand(pattern: str) -> list[str]:
    # Odd parts are what stood in braces.
    parts = [part.split("|") if i % 2 else [part] for i, part in enumerate(re.split(r"\{([^{}]*)\}", pattern))]
    return ["".join(choice) for choice in itertools.product(*parts)]
