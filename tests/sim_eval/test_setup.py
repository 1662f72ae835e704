"""What a page says was run: the run's own numbers, whatever its suite says of itself."""

from __future__ import annotations

from omni_loop.env import EVALUATION_SEED
from omni_loop_sim_eval import bounds, report, summary
from omni_loop_sim_eval.media import Media
from omni_loop_sim_eval.runner import run_suite
from omni_loop_sim_eval.suite import EvalSuite

from .pages import read
from .toy import ToyServer, toy_suite

S = EVALUATION_SEED
SAYS = "Toy, 200 unseen seeds, from one image"


def said(suite: EvalSuite, bound: str = "") -> str:
    connect = bounds.connect(bound, suite) if bound else ToyServer().connect
    run = run_suite(suite, connect)
    return read(report.render(run, summary.summarise(run), Media())).said()


def test_the_header_has_the_run_s_numbers_beside_the_description() -> None:
    suite = toy_suite(description=SAYS, max_steps=5)
    changed = suite.changed(episodes=2, first_seed=7).with_state(True)
    assert f"{SAYS} This run: 2 episodes from seed 7 on, observed as image, position, goal " in said(changed)
    tasks = [{"name": "a"}, {"name": "b"}]
    several = toy_suite(max_steps=5, episodes=1, tasks=tasks)
    assert f"toy through toy This run: 2 episodes of 2 tasks from seed {S} on, observed as image, pos" in said(several)
    assert f"This run: 1 episode from seed {S} on" in said(suite.changed(episodes=1))


def test_a_bound_s_page_does_not_say_that_it_observes() -> None:
    suite = bounds.bounded(toy_suite(description=SAYS, max_steps=5, episodes=1), "random")
    page = said(suite, "random")
    assert "toy-suite with actions drawn at random" in page
    assert f"This run: 1 episode from seed {S} on, looking at nothing it is sent" in page
    assert "acts in toy without looking at what it is sent;" in page
    assert "200 unseen" not in page


def test_late_observations_and_repeated_actions_stand_on_the_page_and_in_the_numbers() -> None:
    suite = toy_suite(max_steps=6, episodes=1, delay_steps=2)
    assert "The policy sees what was 2 control steps ago." in said(suite)
    run = run_suite(suite, ToyServer().connect)
    numbers = summary.summarise(run)
    assert (numbers["delay_steps"], numbers["action_repeat"]) == (2, 1)
    repeated = bounds.bounded(toy_suite(max_steps=6, episodes=1, action_repeat=3), "random")
    page = said(repeated, "random")
    assert "Each action is executed for 3 control steps of the env." in page
    assert "control steps ago" not in page
    plain = said(toy_suite(max_steps=6, episodes=1))
    assert "Each action is executed" not in plain
    assert "control steps ago" not in plain
