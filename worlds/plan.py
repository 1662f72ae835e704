"""Search for actions by imagining: the cross-entropy method and model predictive path integrals.

Both refine a Gaussian over action sequences round by round. A round is one batched rollout of all candidates:

* ``cem`` (Rubinstein & Kroese 2004) fits mean and spread to the best few. As in iCEM (Pinneri et al. 2020, arXiv
  2008.06389) noise is correlated over time, some of the best are kept for the next round, and the mean competes.
* ``mppi`` (Williams et al. 2017, arXiv 1509.01149) moves the mean to the candidates' average, weighted by
  ``exp(-cost / temperature)``; the spread stays.

Nothing here knows a world: a *rollout* says what follows from actions, a *cost* how good that is. Shapes: ``n``
candidates, ``h`` steps, ``a`` numbers an action, ``p`` tokens a frame, ``c`` numbers a token. Actions are in -1..1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from omni_loop.errors import InvalidInput, Reason, StageFailed, UnknownName, nearest

METHODS = ("cem", "mppi")
MAX_CANDIDATES, MAX_ITERATIONS = 1024, 64
MAX_FRAMES = 1 << 15  # imagined in one search: about a minute of a CPU core, which nothing can interrupt

Rollout = Callable[[Tensor], Tensor]  # actions [n, h, a] -> latents [n, h, p, c]
Stepped = Callable[[Tensor], Generator[None, None, Tensor]]  # the same, yielding after each batched pass
Cost = Callable[[Tensor, Tensor], Tensor]  # latents [n, h, p, c], actions [n, h, a] -> [n], lower is better


@dataclass(frozen=True, slots=True)
class SearchConfig:
    """What a client chooses, and how the search behaves.

    ``spread``: standard deviation of the first round. ``colour``: noise power falls with frequency to this power (0:
    white), so that candidates push on and do not tremble on the spot. CEM: ``elites`` is the share fitted to, ``kept``
    the share of those that stays a candidate, ``inertia`` of the old mean and spread against the fitted ones. MPPI:
    ``temperature`` in standard deviations of the round's costs.
    """

    method: str = "cem"
    horizon: int = 8
    candidates: int = 64
    iterations: int = 3
    spread: float = 0.35
    least_spread: float = 0.02
    colour: float = 2.0
    elites: float = 0.125
    kept: float = 0.5
    inertia: float = 0.1
    temperature: float = 0.25

    def check(self, max_horizon: int) -> None:
        """Raise UnknownName for the method, InvalidInput for a count out of range; the text says what can be."""
        if self.method not in METHODS:
            raise UnknownName(f"no planning method is called {self.method!r}.{nearest(self.method, METHODS)}")
        for name, value, least, most in (
            ("horizon", self.horizon, 1, max_horizon),
            ("candidates", self.candidates, 4, MAX_CANDIDATES),
            ("iterations", self.iterations, 1, MAX_ITERATIONS),
        ):
            if not least <= value <= most:
                raise InvalidInput(f"{name} is {value}; a plan takes {least}..{most}")
        frames = self.horizon * self.candidates * self.iterations
        if frames > MAX_FRAMES:
            raise InvalidInput(
                f"horizon x candidates x iterations is {frames} frames to imagine; a plan takes {MAX_FRAMES} at most"
            )


@dataclass(frozen=True, slots=True)
class Found:
    """The best sequence seen, ``actions [h, a]``, and its ``latents [h, p, c]`` as they were imagined.
    ``first_cost`` is the first round's best; ``candidates`` counts those of one round."""

    actions: Tensor
    latents: Tensor
    cost: float
    first_cost: float
    candidates: int
    iterations: int
    out_of_time: bool


class Search:
    """One search, round by round: :meth:`ask` for candidates, :meth:`tell` their costs.

    Deterministic: what is asked follows from ``init``, ``seed`` and the costs told before.
    """

    def __init__(self, config: SearchConfig, init: Tensor, seed: int) -> None:
        """``init [h, a]`` in -1..1 is the first mean, and the first candidate."""
        if init.ndim != 2 or len(init) != config.horizon:
            raise InvalidInput(f"a search over {config.horizon} steps cannot begin at {list(init.shape)}")
        self.config, self.mean = config, init.clamp(-1, 1)
        self.spread = torch.full_like(init, config.spread)
        self._noise = torch.Generator().manual_seed(seed)
        self._kept = init.new_empty(0, *init.shape)

    def ask(self) -> Tensor:
        """Candidates ``[n, h, a]``: the mean, the best of the round before, and new ones around the mean."""
        known = torch.cat([self.mean[None], self._kept])
        drawn = coloured((self.config.candidates - len(known), *self.mean.shape), self.config.colour, self._noise)
        fresh = self.mean + self.spread * drawn.to(self.mean)
        return torch.cat([known, fresh.clamp(-1, 1)])

    def tell(self, actions: Tensor, costs: Tensor) -> None:
        """``costs [n]`` of the candidates asked last; what is infinite is never chosen."""
        if self.config.method == "mppi":
            self._average(actions, costs)
        else:
            self._fit(actions, costs)

    def _fit(self, actions: Tensor, costs: Tensor) -> None:
        c = self.config
        count = min(max(2, round(c.elites * len(actions))), int(costs.isfinite().sum()))
        elites = actions[costs.argsort(stable=True)[:count]]
        self.mean = torch.lerp(elites.mean(0), self.mean, c.inertia)
        self.spread = torch.lerp(elites.std(0, correction=0), self.spread, c.inertia).clamp_min(c.least_spread)
        # One place at least is for a new one.
        self._kept = elites[: min(max(1, round(c.kept * count)), c.candidates - 2)]

    def _average(self, actions: Tensor, costs: Tensor) -> None:
        finite = costs[costs.isfinite()]
        scale = finite.std(correction=0).clamp_min(1e-12) * self.config.temperature
        weights = ((finite.min() - costs) / scale).softmax(0)
        self.mean = (weights[:, None, None] * actions).sum(0)
        self._kept = actions[costs.argmin()][None][: self.config.candidates - 2]


def coloured(shape: tuple[int, int, int], power: float, generator: torch.Generator) -> Tensor:
    """Noise ``[n, h, a]`` of unit variance at every step, whose power falls with frequency to ``power``; like white
    noise its mean over the steps is random too."""
    n, h, a = shape
    white = torch.randn(n, a, h, generator=generator)
    if power == 0 or h < 2:
        return white.transpose(1, 2)
    frequency = torch.fft.rfftfreq(h)
    frequency[0] = frequency[1]
    gains = frequency ** (-power / 2)
    noise = torch.fft.irfft(torch.fft.rfft(white) * gains, n=h)
    response = torch.fft.irfft(gains.to(torch.complex64), n=h)  # its square sum is the variance at any step
    return (noise / response.square().sum().sqrt()).transpose(1, 2)


def plan(
    search: Search, rollout: Rollout, cost: Cost, budget_ms: float = 0.0, now: Callable[[], float] = time.perf_counter
) -> Found:
    """Run ``search`` to its last round, or until no further one fits into ``budget_ms`` (0: no bound).

    The first round is always run. ``now`` is in seconds.

    Raises:
        StageFailed: no candidate of a round has a finite cost.
    """

    def at_once(actions: Tensor) -> Generator[None, None, Tensor]:
        yield from ()
        return rollout(actions)

    rounds = planning(search, at_once, cost, budget_ms, now)
    try:
        while True:
            next(rounds)
    except StopIteration as end:
        found: Found = end.value
        return found


def planning(
    search: Search, rollout: Stepped, cost: Cost, budget_ms: float = 0.0, now: Callable[[], float] = time.perf_counter
) -> Generator[None, None, Found]:
    """:func:`plan` for who has other work to do in between: yields wherever ``rollout`` does."""
    began = round_began = now()
    best_cost = first_cost = float("inf")
    actions = latents = torch.empty(0)
    done = 0
    while True:
        candidates = search.ask()
        imagined = yield from rollout(candidates)
        costs = _checked(cost(imagined, candidates), len(candidates))
        chosen = int(costs.argmin())
        if float(costs[chosen]) < best_cost:
            best_cost, actions, latents = float(costs[chosen]), candidates[chosen], imagined[chosen]
        done += 1
        first_cost = best_cost if done == 1 else first_cost
        ended = now()
        over = 0 < budget_ms < 1e3 * (ended - began + ended - round_began)  # the next takes as long
        if done == search.config.iterations or over:
            late = done < search.config.iterations
            return Found(actions, latents, best_cost, first_cost, len(candidates), done, late)
        search.tell(candidates, costs)
        round_began = ended


def _checked(costs: Tensor, candidates: int) -> Tensor:
    """Costs with infinity for what is not a number."""
    if costs.shape != (candidates,):
        raise StageFailed(f"costs of {candidates} candidates have shape {list(costs.shape)}", reason=Reason.BAD_OUTPUT)
    costs = costs.float().nan_to_num(float("inf"), float("inf"), float("inf"))
    if not costs.isfinite().any():
        raise StageFailed("no imagined future has a finite cost", reason=Reason.BAD_OUTPUT)
    return costs
