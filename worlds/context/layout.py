"""How a session reads as tokens.

::

    [ instruction: 32 tokens ] [ tick 0: 32 tokens ] [ tick 1 ] ...
    tick = 16 frame codes | TICK | agent x y | three keypoints x y | two executed actions x y | QUERY | progress | done

The model writes the last two tokens of a tick: after QUERY it predicts progress (the part of the goal that
is covered, in 64 bins), after that whether the task is done. All else is given. A tick fills two blocks of
16 tokens exactly, the frame one of them. Coordinates are in -1..1 of the table.
"""

from __future__ import annotations

import torch
from torch import Tensor

INSTRUCTION = 32
TICK = 32
GIVEN = TICK - 2  # tokens of a tick that are read, not written

PAD, BEGIN, TICK_MARK, NONE, QUERY = 0, 1, 2, 3, 4
BYTES = 16
FRAME = BYTES + 256
FRAME_CODES = 1000
PLACE = FRAME + FRAME_CODES
PLACES = 512
PROGRESS = PLACE + PLACES
PROGRESS_BINS = 64
DONE_NO = PROGRESS + PROGRESS_BINS
DONE_YES = DONE_NO + 1
VOCABULARY = DONE_YES + 1

#: Keypoints of the readout (the agent is point 0) that are written as tokens: both ends of the T's bar and
#: the foot of its stem.
KEYPOINTS = (1, 2, 5)

# Positions inside a tick.
FRAME_AT = slice(0, 16)
POINTS_AT = slice(17, 25)
ACTIONS_AT = slice(25, 29)
QUERY_AT, PROGRESS_AT, DONE_AT = 29, 30, 31


def place_tokens(x: Tensor) -> Tensor:
    """Coordinates in -1..1 to one of 512 bins of a pixel each; values outside go to the border bins."""
    return ((x + 1) * 0.5 * PLACES).floor().long().clamp(0, PLACES - 1) + PLACE


def progress_tokens(coverage: Tensor) -> Tensor:
    """Coverage in 0..1 to its nearest progress bin."""
    return (coverage.clamp(0, 1) * (PROGRESS_BINS - 1)).round().long() + PROGRESS


def progress_values(logits: Tensor) -> Tensor:
    """Expected progress in 0..1 under the progress bins of ``logits[..., vocabulary]`` (or of its end)."""
    weights = logits[..., PROGRESS - VOCABULARY : DONE_NO - VOCABULARY].softmax(-1)
    return weights @ torch.linspace(0, 1, PROGRESS_BINS, device=logits.device)


def done_probability(logits: Tensor, bias: float = 0.0) -> Tensor:
    """Probability that the task is done, of yes against no, with ``bias`` taken off its log odds. Of ``logits`` the
    last two count."""
    return (logits[..., DONE_YES - VOCABULARY] - logits[..., DONE_NO - VOCABULARY] - bias).sigmoid()


def instruction_tokens(text: str) -> Tensor:
    """``int64[32]``: BEGIN, up to 31 UTF-8 bytes, padding. Longer instructions keep their first bytes."""
    data = text.encode()[: INSTRUCTION - 1]
    tokens = torch.full((INSTRUCTION,), PAD)
    tokens[0] = BEGIN
    if data:
        tokens[1 : 1 + len(data)] = torch.tensor(list(data)) + BYTES
    return tokens


def given_tokens(frame: Tensor, points: Tensor, executed: Tensor, known: Tensor) -> Tensor:
    """The read part of ticks, ``int64[b, 30]``.

    ``frame int64[b, 16]`` codes; ``points[b, 9, 2]`` the scene; ``executed[b, 2, 2]`` the middle and the
    last action executed since the tick before, ``known bool[b]`` whether there was any.
    """
    b = frame.shape[0]
    seen = points[:, [0, *KEYPOINTS]].flatten(1)  # [b, 8]
    actions = torch.where(known[:, None], place_tokens(executed.flatten(1)), NONE)
    mark, query = torch.full((b, 1), TICK_MARK), torch.full((b, 1), QUERY)
    return torch.cat([frame + FRAME, mark, place_tokens(seen), actions, query], 1)


def pick_executed(actions: Tensor) -> tuple[Tensor, bool]:
    """The middle and the last of ``actions[k, 2]`` as ``[2, 2]``, and whether there was any."""
    k = actions.shape[0]
    if k == 0:
        return torch.zeros(2, 2), False
    return actions[[(k - 1) // 2, k - 1]], True
