"""The session machine's two tables as Markdown, for docs/sessions.md; ``python -m omni_loop.session.tables FILE`` puts
them there, between the comments that name them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from .machine import TABLE, VERDICTS, Arrival, Event, Phase, Standing


def verdicts() -> str:
    """What is done with a seq that arrives: a row for what it is, a column for how the session stands."""
    rows = ([f"`{a}`", *(f"`{VERDICTS[standing, a]}`" for standing in Standing)] for a in Arrival)
    return _table(["seq \\ session", *(f"`{standing}`" for standing in Standing)], rows)


def transitions() -> str:
    """Where an event leads: a row for each event, a column for each phase in which any is possible."""
    phases = [phase for phase in Phase if any(key[0] is phase for key in TABLE)]
    rows = ([f"`{e}`", *(_to(TABLE.get((phase, e))) for phase in phases)] for e in Event)
    return _table(["event \\ phase", *(f"`{phase}`" for phase in phases)], rows)


def filled(text: str) -> str:
    """``text`` with both tables as they are now."""
    for name, table in (("verdicts", verdicts()), ("transitions", transitions())):
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        parts = re.split(f"(?s){begin}.*?{end}", text)
        if len(parts) != 2:
            raise ValueError(f"the text has {len(parts) - 1} places for {name}, not one")
        text = f"{begin}{table}{end}".join(parts)
    return text


def _to(phase: Phase | None) -> str:
    return "" if phase is None else f"`{phase}`"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(filled(file.read_text("utf-8")), "utf-8")
