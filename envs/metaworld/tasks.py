"""Which of Meta-World's tasks are used for what, and how each is said in words."""

from __future__ import annotations

#: The six that the shipped policy acts in from state; the three of them that one small camera suffices for.
SIX = ("reach-v3", "push-v3", "pick-place-v3", "button-press-v3", "drawer-open-v3", "door-open-v3")
THREE = ("door-open-v3", "drawer-open-v3", "button-press-v3")

#: What a policy is told; suites send these as prompts.
INSTRUCTIONS = {
    "reach-v3": "reach the goal with the gripper",
    "push-v3": "push the puck to the goal",
    "pick-place-v3": "pick up the puck and carry it to the goal",
    "button-press-v3": "press the button",
    "drawer-open-v3": "open the drawer",
    "door-open-v3": "open the door",
}
