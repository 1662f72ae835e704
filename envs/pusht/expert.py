"""An expert for PushT that plans by simulation.

It samples contact points on the T's perimeter, pushes straight in from 20 px outside in a private copy of
the physics, scores each push by how near the T's keypoints come to the goal (plus a little for the way
there), walks to the best start around the T by a visibility graph, pushes, and plans again.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from gym_pusht.envs.pusht import PushTEnv
from numpy.typing import NDArray
from shapely.geometry import LineString, Point, Polygon
from shapely.ops import nearest_points

from ..experts import expert_of
from .env import PushT
from .geometry import OUTLINE, Array, contact_points, goal_distance, rotation, to_world

_STANDOFF = 20.0  # px outside the outline where a push starts
_AGENT_CLEARANCE = 17.5  # agent radius 15 + margin
_CONTROL_STEPS = 10  # physics steps of 0.01 s per control step
_CANDIDATES = 56
_MAX_PUSH = 7


@dataclass(slots=True)
class Push:
    """A straight push: from ``start`` along ``direction``, the target moving ``stride`` px a step."""

    start: Array
    direction: Array
    stride: float
    steps: int
    done: int = 0
    walked: int = 0
    target: Array | None = None  # None while the agent still walks to the start


class PushSimulator:
    """A private copy of the physics in which pushes are tried."""

    def __init__(self) -> None:
        self._env = PushTEnv(obs_type="state")
        self._env._setup()
        self._env.collision_handeler.post_solve = lambda *_: None

    def place(self, agent: Array, pose: Array) -> None:
        """Put agent and T at rest. Shapes are re-indexed, or contacts would use the old pose."""
        env, block = self._env, self._env.block
        block.velocity, block.angular_velocity, block.force = (0, 0), 0, (0, 0)
        block.angle = float(pose[2])
        block.position = (float(pose[0]), float(pose[1]))
        env.agent.position = (float(agent[0]), float(agent[1]))
        env.agent.velocity = (0, 0)
        env.space.reindex_shapes_for_body(block)
        env.space.reindex_shapes_for_body(env.agent)

    def step(self, action: Array) -> None:
        """One control step towards ``action`` (the environment's own controller)."""
        agent, ax, ay = self._env.agent, float(action[0]), float(action[1])
        for _ in range(_CONTROL_STEPS):
            (px, py), (vx, vy) = agent.position, agent.velocity
            agent.velocity = (
                vx + (100 * (ax - px) - 20 * vx) * 0.01,
                vy + (100 * (ay - py) - 20 * vy) * 0.01,
            )
            self._env.space.step(0.01)

    @property
    def pose(self) -> Array:
        block = self._env.block
        return np.array([block.position[0], block.position[1], block.angle])


class PushTExpert:
    """Acts on the true state. Deterministic for a seed; ``reset`` begins an episode."""

    def __init__(self) -> None:
        self._sim = PushSimulator()
        self._contacts = contact_points()
        self.reset(0)

    def reset(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._push: Push | None = None

    def forget(self) -> None:
        """Drop the current plan (the world moved in another way than it assumed)."""
        self._push = None

    def act(self, state: NDArray[np.floating]) -> NDArray[np.float32]:
        """Target position ``float32[2]`` in 0..512 for ``state[5]``."""
        agent, pose = np.asarray(state[:2], np.float64), np.asarray(state[2:], np.float64)
        return np.clip(self._act(agent, pose), 0, 512).astype(np.float32)

    def _act(self, agent: Array, pose: Array) -> Array:
        if self._push is None:
            self._push = self._plan(agent, pose)
            if self._push is None:
                return np.array([256.0, 256.0])
        push = self._push
        if push.target is None:
            push.walked += 1
            arrived = np.linalg.norm(agent - push.start) < 4.5
            if not arrived and push.walked <= 40:
                return self._walk(agent, pose, push)
            push.target = push.start + push.direction * 6
        push.target = push.target + push.direction * push.stride
        push.done += 1
        if push.done >= push.steps:
            self._push = None
        return np.clip(push.target, 12, 500)

    def _walk(self, agent: Array, pose: Array, push: Push) -> Array:
        path = shortest_path(agent, push.start, pose)
        if path is None:  # boxed in: back away from the T and plan again
            self._push = None
            away = agent - to_world(np.array([[0.0, 45.0]]), pose)[0]
            away = away / (np.linalg.norm(away) + 1e-6)
            back: Array = agent + away * 30 + self._rng.normal(size=2) * 10
            return back
        step = path[0] - agent
        length, reach = float(np.linalg.norm(step)), 70.0 if len(path) == 1 else 60.0
        return agent + (step if length < reach else step / length * reach)

    def _starts(self, pose: Array) -> list[tuple[Array, Array]]:
        """Reachable push starts and their outward normals in table pixels."""
        body, found = Polygon(to_world(OUTLINE, pose)), []
        for i in self._rng.permutation(len(self._contacts)):
            point, normal = self._contacts[i]
            outward = rotation(float(pose[2])) @ normal
            start = to_world(point[None], pose)[0] + outward * _STANDOFF
            if ((start > 18) & (start < 494)).all() and body.distance(Point(*start)) >= 16:
                found.append((start, outward))
            if len(found) >= _CANDIDATES:
                break
        return found

    def _plan(self, agent: Array, pose: Array) -> Push | None:
        distance = goal_distance(pose)
        stride = 12.0 if distance > 25 else 6.0 if distance >= 12 else 3.5
        best_score, best = np.inf, None
        for start, outward in self._starts(pose):
            angle = 0.0 if self._rng.random() < 0.5 else self._rng.uniform(-0.5, 0.5)
            direction = rotation(angle) @ -outward
            travel = 0.012 * float(np.linalg.norm(start - agent))
            self._sim.place(start, pose)
            target = start + direction * 6
            for k in range(_MAX_PUSH):
                target = target + direction * stride
                self._sim.step(np.clip(target, 12, 500))
                score = goal_distance(self._sim.pose) + travel
                if k >= 1 and score < best_score:
                    best_score, best = score, Push(start, direction, stride, k + 1)
        return best


def shortest_path(agent: Array, goal: Array, pose: Array) -> list[Array] | None:
    """Way points from ``agent`` to ``goal`` around the inflated T, or None when there is no way."""
    inflated = Polygon(to_world(OUTLINE, pose)).buffer(_AGENT_CLEARANCE)
    if inflated.contains(Point(*agent)):  # touching the T: step out first
        edge = np.array(nearest_points(inflated.exterior, Point(*agent))[0].coords[0])
        out = edge - agent
        return [edge + out / (np.linalg.norm(out) + 1e-6) * 3]
    if not LineString([agent, goal]).intersects(inflated):
        return [goal]
    hull = Polygon(to_world(OUTLINE, pose)).convex_hull.buffer(26, join_style="mitre")
    ring = np.concatenate(
        [np.array(hull.exterior.coords)[:-1], to_world(np.array([(48.0, 62.0), (-48.0, 62.0)]), pose)]
    )
    nodes = [agent, *(p for p in ring if ((p > 14) & (p < 498)).all()), goal]
    return _dijkstra(nodes, inflated)


def _dijkstra(nodes: list[Array], obstacle: Polygon) -> list[Array] | None:
    last = len(nodes) - 1
    cost, came_from = [np.inf] * len(nodes), [-1] * len(nodes)
    cost[0], queue = 0.0, [(0.0, 0)]
    while queue:
        d, u = heapq.heappop(queue)
        if d > cost[u]:
            continue
        if u == last:
            break
        for v in range(len(nodes)):
            length = float(np.linalg.norm(nodes[u] - nodes[v])) + 5  # 5: prefer few corners
            if v == u or d + length >= cost[v] or LineString([nodes[u], nodes[v]]).intersects(obstacle):
                continue
            cost[v], came_from[v] = d + length, u
            heapq.heappush(queue, (cost[v], v))
    if came_from[last] < 0:
        return None
    path, u = [], last
    while u:
        path.append(nodes[u])
        u = came_from[u]
    return path[::-1]


for_env = expert_of(PushT, PushTExpert)
