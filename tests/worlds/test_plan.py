"""The search on a world whose best actions are known: latents are the agent's place after each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from omni_loop.errors import InvalidInput, StageFailed, UnknownName
from omni_loop_worlds.plan import METHODS, Found, Search, SearchConfig, coloured, plan, planning

H, GOAL = 8, torch.tensor([0.5, -0.4])
REST = torch.zeros(H, 2)


def rollout(actions: Tensor) -> Tensor:
    """A lazy agent, from the middle of the table: it goes a third of the way to where it shall ``[n, h, 1, 2]``."""
    place, places = torch.zeros(len(actions), 2), []
    for action in actions.unbind(1):
        place = place + (action - place) / 3
        places.append(place)
    return torch.stack(places, 1)[:, :, None]


def to_goal(latents: Tensor, actions: Tensor) -> Tensor:
    return (latents[:, -1, 0] - GOAL).norm(dim=-1)


def search(
    method: str = "cem", iterations: int = 8, seed: int = 0, init: Tensor = REST, candidates: int = 64
) -> Search:
    return Search(SearchConfig(method, H, candidates, iterations), init, seed)


def clock(*seconds: float) -> Callable[[], float]:
    """Readings of a clock; the last one stays."""
    left = list(seconds)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


@pytest.mark.parametrize("method", METHODS)
def test_the_goal_is_found(method: str) -> None:
    found = plan(search(method), rollout, to_goal)
    at_rest = float(GOAL.norm())
    assert found.cost < 0.1 * at_rest
    assert found.cost < found.first_cost < at_rest
    assert found.actions.shape == (H, 2)
    assert found.actions.abs().max() <= 1
    assert (found.latents == rollout(found.actions[None])[0]).all()
    assert found.cost == float(to_goal(found.latents[None], found.actions[None]))
    assert (found.candidates, found.iterations, found.out_of_time) == (64, 8, False)


@pytest.mark.parametrize("method", METHODS)
def test_rounds_pay(method: str) -> None:
    """As many rollouts in one round are worth less, over ten seeds."""
    many = [plan(search(method, 8, seed, candidates=32), rollout, to_goal).cost for seed in range(10)]
    once = [plan(search(method, 1, seed, candidates=256), rollout, to_goal).cost for seed in range(10)]
    assert sum(many) < 0.7 * sum(once)


@pytest.mark.parametrize("method", METHODS)
def test_a_seed_is_a_plan(method: str) -> None:
    a, b, other = (plan(search(method, 3, seed), rollout, to_goal) for seed in (5, 5, 6))
    assert (a.actions == b.actions).all()
    assert a.cost == b.cost
    assert (a.actions != other.actions).any()


def test_it_begins_where_it_is_told() -> None:
    init = GOAL.expand(H, 2) * 0.9
    first = search(init=init).ask()
    assert (first[0] == init).all()
    assert (first[1:] != init).any(-1).any(-1).all()
    found = plan(search(iterations=1, init=init), rollout, lambda latents, actions: (actions - init).abs().sum((1, 2)))
    assert found.cost == 0
    assert (found.actions == init).all()


def test_what_leaves_the_table_is_clipped() -> None:
    asked = search(init=torch.full((H, 2), 3.0)).ask()
    assert asked.abs().max() == 1
    assert (asked[0] == 1).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("candidates", [4, 5, 9])
def test_few_candidates_are_enough(method: str, candidates: int) -> None:
    asked: list[int] = []

    def count(actions: Tensor) -> Tensor:
        asked.append(len(actions))
        return rollout(actions)

    found = plan(search(method, 20, candidates=candidates), count, to_goal)
    assert asked == [candidates] * 20
    assert found.cost < float(GOAL.norm())


def test_the_best_of_all_rounds_is_kept() -> None:
    """Costs that rise with every round: the first round's best is the answer."""
    rounds: Iterator[int] = iter(range(100))

    def rising(latents: Tensor, actions: Tensor) -> Tensor:
        return to_goal(latents, actions) + 10 * next(rounds)

    found, once = plan(search(iterations=4), rollout, rising), plan(search(iterations=1), rollout, to_goal)
    assert found.cost == found.first_cost == once.cost
    assert (found.actions == once.actions).all()
    assert found.iterations == 4


@pytest.mark.parametrize(
    ("budget_ms", "rounds"),
    # A round takes 10 ms: the next one is begun only when it would end in time. The first always is.
    [(1, 1), (10, 1), (19.9, 1), (20.1, 2), (35, 3), (59.9, 5), (60.1, 6), (0, 6)],
)
def test_a_budget_ends_the_search_between_rounds(budget_ms: float, rounds: int) -> None:
    ticks = clock(*(0.01 * i for i in range(20)))
    found = plan(search(iterations=6), rollout, to_goal, budget_ms, ticks)
    assert found.iterations == rounds
    assert found.out_of_time == (rounds < 6)
    assert found.cost == plan(search(iterations=rounds), rollout, to_goal).cost


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_futures_that_are_not_finite_are_not_chosen(method: str, bad: float) -> None:
    def cost(latents: Tensor, actions: Tensor) -> Tensor:
        return torch.where(actions[:, 0, 0] > 0, torch.tensor(bad), to_goal(latents, actions))

    found = plan(search(method, 4), rollout, cost)
    assert found.actions[0, 0] <= 0
    assert found.cost < found.first_cost


def test_without_a_finite_cost_there_is_no_plan() -> None:
    with pytest.raises(StageFailed, match="finite cost"):
        plan(search(), rollout, lambda latents, actions: torch.full((len(actions),), float("nan")))
    with pytest.raises(StageFailed, match=r"costs of 64 candidates have shape \[64, 1\]"):
        plan(search(), rollout, lambda latents, actions: torch.zeros(len(actions), 1))


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        (SearchConfig("cen"), UnknownName, "Did you mean 'cem'"),
        (SearchConfig(horizon=17), InvalidInput, r"horizon is 17; a plan takes 1\.\.16"),
        (SearchConfig(horizon=0), InvalidInput, "horizon"),
        (SearchConfig(candidates=3), InvalidInput, "candidates"),
        (SearchConfig(candidates=2000), InvalidInput, "1024"),
        (SearchConfig(iterations=0), InvalidInput, "iterations"),
        (SearchConfig("cem", 16, 1024, 3), InvalidInput, "is 49152 frames to imagine; a plan takes 32768"),
    ],
)
def test_what_cannot_be_searched_is_said(config: SearchConfig, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        config.check(16)


def test_a_beginning_of_another_length_is_refused() -> None:
    with pytest.raises(InvalidInput, match="8 steps"):
        search(init=torch.zeros(7, 2))


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("steps", [1, 2, 7, 8, 16])
def test_noise_has_unit_variance_at_every_step(power: float, steps: int) -> None:
    noise = coloured((20000, steps, 2), power, torch.Generator().manual_seed(0))
    assert noise.shape == (20000, steps, 2)
    torch.testing.assert_close(noise.var(0), torch.ones(steps, 2), rtol=0.06, atol=0)
    torch.testing.assert_close(noise.mean(0), torch.zeros(steps, 2), rtol=0, atol=0.04)


def test_coloured_noise_holds_its_direction() -> None:
    def correlation(power: float) -> float:
        noise = coloured((4000, H, 2), power, torch.Generator().manual_seed(0))
        return float((noise[:, 1:] * noise[:, :-1]).mean())

    assert abs(correlation(0)) < 0.03
    assert correlation(2) > correlation(1) > 0.2


def test_who_has_other_work_gets_a_turn_after_every_pass() -> None:
    turns = []

    def stepped(actions: Tensor) -> Iterator[None]:
        yield
        yield
        return rollout(actions)  # type: ignore[return-value]

    rounds = planning(search(iterations=3), stepped, to_goal)  # type: ignore[arg-type]
    while True:
        try:
            turns.append(next(rounds))
        except StopIteration as end:
            found: Found = end.value
            break
    assert len(turns) == 6
    assert (found.actions == plan(search(iterations=3), rollout, to_goal).actions).all()


def test_the_largest_search_is_taken() -> None:
    SearchConfig("mppi", 16, 1024, 2).check(16)
    SearchConfig("cem", 8, 64, 64).check(16)
