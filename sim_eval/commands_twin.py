"""``omni-loop eval twin``: the same policies in the simulator and in the world model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from omni_loop.cli import output
from omni_loop.config import shipped

from . import horizon, twin_page
from .plays import JOURNAL, Plays
from .twin import Twin, serving
from .twin_config import load_twin

_SHOWN = (1, 2, 4, 8, 12, 16, 24, 32)  # steps ahead


def twin_command(
    experiment: Annotated[
        str, typer.Argument(help=f"Shipped experiment ({', '.join(shipped('twin'))}) or a path to one.")
    ] = "pusht",
    policies: Annotated[
        str | None, typer.Option(help="Only these of its policies, by commas.", show_default=False)
    ] = None,
    runs: Annotated[int | None, typer.Option(min=1, help="Runs of the expert that branches are of.")] = None,
    episodes: Annotated[int | None, typer.Option(min=1, help="Whole episodes in the simulator.")] = None,
    imagined_episodes: Annotated[int | None, typer.Option(min=0, help="Whole ones in the world model.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="First seed; the others follow.")] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Imagined branches at a time.")] = 4,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew instead of going on.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for twin.html, twin.json and the plays.")] = Path("runs/twin"),
) -> None:
    """Hold imagination against reality: policies of different strength in the simulator and in the world model.

    Says how well the imagined figures foretell real ones (Pearson r, rank violation), how many steps ahead predicted
    frames hold, and how well the progress head is calibrated. One page, JSON, and every play; the same command again
    goes on where it was ended.

    omni-loop eval twin pusht --out runs/twin
    """
    console = Console()
    given = {"runs": runs, "episodes": episodes, "imagined_episodes": imagined_episodes, "first_seed": seed}
    config = load_twin(experiment).changed(**{k: v for k, v in given.items() if v is not None})
    config = config.only([p.strip() for p in policies.split(",")] if policies else [])
    output.folder(out, "--out", "twin.json", "twin.html", JOURNAL)
    plays = Plays(out, config.fingerprint() | config.named(), fresh)
    with console.status("") as status:
        twin = Twin(config, plays, lambda policy: serving(config, policy), status.update, at_once)
        try:
            steps = twin.run()
        finally:
            twin.close()
    found = twin_page.findings(config, plays, steps, horizon.lpips_distance()[1])
    page = twin_page.write(found, out)
    for table in tables(found):
        console.print(table)
    console.print(twin_page.verdict(found.agreements), markup=False, highlight=False)
    console.print(f"report: {page}", markup=False, soft_wrap=True)


def tables(found: twin_page.Findings) -> list[Table]:
    """What the command prints."""
    titles = ("policy", "success", "best score", "imagined success", "measure, real", "imagined")
    policies = Table(*titles, title="Policies")
    for row in found.numbers()["policies"]:
        low, high = row["success_ci95"]
        policies.add_row(
            row["policy"],
            f"{row['successes']}/{row['episodes']} [{100 * low:.0f}–{100 * high:.0f} %]",
            f"{row['best_score']:.3f}",
            f"{row['imagined_successes']}/{row['imagined_episodes']}",
            f"{row['real_measure']:+.4f}",
            f"{row['imagined_measure']:+.4f}",
        )
    agree = Table("held against each other", "r", "Fisher 95 %", "episodes drawn again", "MMRV", title="Agreement")
    for name, a in found.agreements.items():
        said = twin_page.row(name, a)
        agree.add_row(said["title"], said["r"], said["fisher"], said["sampled"], said["mmrv"])
    ahead = Table("steps ahead", "PSNR", "copy", "SSIM", "copy", "agent px", "other actions", "stays", title="Frames")
    for step in found.horizon:
        if step.ahead in _SHOWN:
            values = (step.psnr, step.copy_psnr, step.ssim, step.copy_ssim)
            px = (step.agent, step.agent_other, step.agent_still)
            ahead.add_row(str(step.ahead), *(f"{v:.3f}" for v in values), *(f"{v:.1f}" for v in px))
    made = [policies, agree, ahead]
    if found.calibration is not None:
        done, track = found.calibration
        head = Table("", "ticks", "Brier", "base rate's", "ECE", "F1", "mean error", "r", title="Progress head")
        rated = (done.brier, done.base_brier, done.ece, done.f1)
        head.add_row("done", str(done.n), *(f"{v:.4f}" for v in rated), "", "")
        head.add_row(
            "progress", str(track.n), "", "", f"{track.ece:.4f}", "", f"{track.mae:.4f}", f"{track.pearson:.3f}"
        )
        made.append(head)
    return made
