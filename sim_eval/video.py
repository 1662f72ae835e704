"""Videos as H.264 in MP4, which every browser plays, with a caption above each frame."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from omni_loop.errors import InvalidInput

Frame = NDArray[np.uint8]

_CAPTION = 48  # px above the frame: a player's controls hide what is below
_INK, _PAPER, _MUTED = (235, 238, 242), (17, 21, 28), (138, 150, 168)
ACCENT, GOOD, BAD = (96, 165, 250), (52, 199, 123), (240, 96, 96)


def write_mp4(path: Path, frames: Iterable[Frame], fps: float, hold_s: float = 1.0) -> Path:
    """Write ``uint8[h, w, 3]`` frames of one size; the last one stays for ``hold_s``. Sides are padded to even."""
    # Else ffmpeg is started by fork, which gRPC's threads in this process do not always survive.
    os.environ.setdefault("IMAGEIO_FFMPEG_NO_PREVENT_SIGINT", "1")
    import imageio.v2 as imageio

    writer = imageio.get_writer(
        path, fps=fps, codec="libx264", quality=None, pixelformat="yuv420p", macro_block_size=1,
        output_params=["-crf", "23", "-preset", "veryfast", "-movflags", "+faststart", "-threads", "1"],
    )  # fmt: skip
    last: Frame | None = None
    try:
        for frame in frames:
            last = _even(frame)
            writer.append_data(last)
        if last is None:
            raise InvalidInput(f"no frames for {path.name}")
        for _ in range(round(hold_s * fps)):
            writer.append_data(last)
    finally:
        writer.close()
    return path


def _even(frame: Frame) -> Frame:
    h, w = frame.shape[:2]
    return np.pad(frame, ((0, h % 2), (0, w % 2), (0, 0)), mode="edge") if h % 2 or w % 2 else frame


def resize(frame: Frame, width: int) -> Frame:
    """The frame at ``width`` px, same aspect."""
    h, w = frame.shape[:2]
    if w == width:
        return frame
    return np.asarray(Image.fromarray(frame).resize((width, round(h * width / w)), Image.Resampling.BICUBIC))


def caption(
    frame: Frame, text: str, right: str = "", bar: float | None = None, colour: tuple[int, int, int] = ACCENT
) -> Frame:
    """``frame`` with a line of text above it and, for ``bar`` in 0..1, a progress bar under the text."""
    h, w = frame.shape[:2]
    image = Image.new("RGB", (w, h + _CAPTION), _PAPER)
    image.paste(Image.fromarray(frame), (0, _CAPTION))
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(size=max(11, w // 24))
    middle = (_CAPTION - (10 if bar is not None else 0)) / 2
    draw.text((10, middle), text, fill=_INK, font=font, anchor="lm")
    draw.text((w - 10, middle), right, fill=_MUTED, font=font, anchor="rm")
    if bar is not None:
        top, end = _CAPTION - 12, 10 + (w - 20) * min(max(bar, 0.0), 1.0)
        draw.rounded_rectangle((10, top, w - 10, top + 5), 2, fill=(44, 52, 66))
        if end > 12:
            draw.rounded_rectangle((10, top, end, top + 5), 2, fill=colour)
    return np.asarray(image)


def beside(frames: Sequence[Frame], gap: int = 8) -> Frame:
    """Frames of one height next to each other."""
    pad = np.full((frames[0].shape[0], gap, 3), _PAPER, np.uint8)
    row: list[Frame] = [frames[0]]
    for frame in frames[1:]:
        row += [pad, frame]
    return np.concatenate(row, axis=1)
