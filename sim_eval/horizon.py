"""How far ahead a world model can be believed: its frames held against real ones, step by step, under the same actions.

PSNR is of the mean squared error over all branches; SSIM and LPIPS are means. Action-following is how far the agent in
a predicted frame, where the readout sees it, is from where the real one went.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_loop.errors import InvalidInput

from .branches import Branch
from .play import Actions, WorldSession, predicted

Frames = NDArray[np.uint8]
#: Distance of two stacks of frames ``uint8[n, h, w, 3]``, ``float[n]``.
Distance = Callable[[Frames, Frames], NDArray[np.float64]]

_SIGMA, _RADIUS = 1.5, 5  # px: the window of 11 x 11 of the paper
_C1, _C2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2


@dataclass(frozen=True, slots=True)
class Step:
    """One step ahead over ``n`` branches. ``copy_*``: of repeating the last real frame. In px of the action space:
    ``agent`` is the error of the imagined agent, ``agent_still`` of one that stays, ``agent_other`` of one imagined
    under another branch's actions; ``to_command`` how far the imagined agent is from what was commanded, and
    ``real_to_command`` the real one. ``lpips``: None where it was not measured."""

    ahead: int
    n: int
    psnr: float
    copy_psnr: float
    ssim: float
    copy_ssim: float
    agent: float
    agent_still: float
    agent_other: float
    to_command: float
    real_to_command: float
    lpips: float | None = None
    copy_lpips: float | None = None

    def row(self) -> dict[str, Any]:
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items()}


def psnr(a: Frames, b: Frames) -> float:
    """Decibels of the mean squared error over everything in ``a`` and ``b``; 120 at most, for what is equal."""
    error = np.square(a.astype(np.float64) - b).mean() / 255**2
    return float(-10 * np.log10(max(error, 1e-12)))


def ssim(a: Frames, b: Frames) -> NDArray[np.float64]:
    """Structural similarity ``float[n]`` of ``uint8[n, h, w, c]`` (Wang et al. 2004: Gaussian window of 11 x 11, sigma
    1.5, K 0.01 and 0.03), the mean over channels and over every place where the whole window lies inside.

    Raises:
        InvalidInput: not two equal stacks of images of at least 11 x 11.
    """
    if a.shape != b.shape or a.ndim != 4 or min(a.shape[1:3]) <= 2 * _RADIUS:
        raise InvalidInput(f"wanted two equal stacks of images of 11 x 11 or more: {list(a.shape)}, {list(b.shape)}")
    x, y = a.astype(np.float64), b.astype(np.float64)
    mx, my = _blurred(x), _blurred(y)
    vx, vy, both = _blurred(x * x) - mx * mx, _blurred(y * y) - my * my, _blurred(x * y) - mx * my
    score = ((2 * mx * my + _C1) * (2 * both + _C2)) / ((mx * mx + my * my + _C1) * (vx + vy + _C2))
    made: NDArray[np.float64] = score.mean((1, 2, 3))
    return made


def _blurred(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Local means where the window lies inside ``x [n, h, w, c]``."""
    from scipy.ndimage import correlate1d

    at = np.arange(-_RADIUS, _RADIUS + 1)
    window = np.exp(-0.5 * (at / _SIGMA) ** 2)
    window /= window.sum()
    means = correlate1d(correlate1d(x, window, 1), window, 2)
    inside = slice(_RADIUS, -_RADIUS)
    cut: NDArray[np.float64] = means[:, inside, inside]
    return cut


def lpips_distance() -> tuple[Distance | None, str]:
    """LPIPS (Zhang et al. 2018, AlexNet) where the package ``lpips`` and its weights are here already; else None and
    why. Nothing is downloaded: the weights it stands on are torchvision's, which it would fetch."""
    try:
        lpips: Any = import_module("lpips")  # no dependency of ours: whoever has it
        import torch
        from torch.hub import get_dir
    except ModuleNotFoundError as e:
        return None, f"not measured: the package {e.name} is not installed"
    from pathlib import Path

    if not list(Path(get_dir(), "checkpoints").glob("alexnet-*.pth")):
        return None, "not measured: torchvision's weights of AlexNet are not on this machine"
    model = lpips.LPIPS(net="alex", verbose=False)

    def distance(a: Frames, b: Frames) -> NDArray[np.float64]:
        x, y = (torch.from_numpy(v).permute(0, 3, 1, 2).float() / 127.5 - 1 for v in (a, b))
        with torch.no_grad():
            made: NDArray[np.float64] = model(x, y).flatten().double().numpy()
        return made

    return distance, ""


@dataclass(frozen=True)
class Imagined:
    """Of ``n`` branches over ``h`` steps: frames ``uint8[n, h, ...]`` predicted and real, the last real one before
    them ``[n, ...]``, and positions ``float[n, h, 2]`` of the agent."""

    frames: Frames
    real: Frames
    last: Frames
    agent: NDArray[np.float64]
    other: NDArray[np.float64]
    real_agent: NDArray[np.float64]
    before: NDArray[np.float64]  # [n, 2]
    commanded: NDArray[np.float64]


def imagine_runs(
    open_world: Callable[[int], WorldSession], branches: Sequence[Branch], steps: int, image: str, agent: str
) -> Imagined:
    """Each branch's own next ``steps`` actions imagined, and those of the branch before it in the list. Branches whose
    run ends sooner are left out.

    Raises:
        InvalidInput: fewer than two branches are left.
    """
    long = [b for b in branches if b.after >= steps]
    if len(long) < 2:
        raise InvalidInput(f"{len(long)} of {len(branches)} branches go on for {steps} steps: wanted at least 2")

    def ahead(b: Branch) -> Actions:
        return b.run.actions[b.step : b.step + steps]

    own = [_imagined(open_world, b, ahead(b), image) for b in long]
    other = [_imagined(open_world, b, ahead(long[i - 1]), image)[1] for i, b in enumerate(long)]

    def real(b: Branch, key: str) -> NDArray[Any]:
        return b.run.arrays[key][b.step + 1 : b.step + 1 + steps]

    return Imagined(
        frames=np.stack([frames for frames, _ in own]),
        real=np.stack([real(b, image) for b in long]),
        last=np.stack([b.run.arrays[image][b.step] for b in long]),
        agent=np.stack([scene[:, 0] for _, scene in own]).astype(np.float64),
        other=np.stack([scene[:, 0] for scene in other]).astype(np.float64),
        real_agent=np.stack([real(b, agent)[:, -1] for b in long]).astype(np.float64),
        before=np.stack([b.run.arrays[agent][b.step, -1] for b in long]).astype(np.float64),
        commanded=np.stack([ahead(b) for b in long]).astype(np.float64),
    )


def _imagined(
    open_world: Callable[[int], WorldSession], branch: Branch, actions: Actions, image: str
) -> tuple[Frames, NDArray[np.float32]]:
    session = open_world(branch.run.seed)
    try:
        shown, executed = branch.shown([image])
        session.recondition(shown, executed=executed, first_step=0)
        most = session.spec.max_predict
        parts = [predicted(session, actions[i : i + most]) for i in range(0, len(actions), most)]
    finally:
        session.close()
    return np.concatenate([f for f, _ in parts]), np.concatenate([s for _, s in parts])


def curve(made: Imagined, distance: Distance | None = None) -> list[Step]:
    """One row per step ahead."""
    rows = []
    for h in range(made.frames.shape[1]):
        frames, real, last = made.frames[:, h], made.real[:, h], made.last
        at, command = made.real_agent[:, h], made.commanded[:, h]
        rows.append(
            Step(
                ahead=h + 1,
                n=len(frames),
                psnr=psnr(frames, real),
                copy_psnr=psnr(last, real),
                ssim=float(ssim(frames, real).mean()),
                copy_ssim=float(ssim(last, real).mean()),
                agent=_apart(made.agent[:, h], at),
                agent_still=_apart(made.before, at),
                agent_other=_apart(made.other[:, h], at),
                to_command=_apart(made.agent[:, h], command),
                real_to_command=_apart(at, command),
                lpips=None if distance is None else float(distance(frames, real).mean()),
                copy_lpips=None if distance is None else float(distance(last, real).mean()),
            )
        )
    return rows


def _apart(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    return float(np.linalg.norm(a - b, axis=1).mean())
