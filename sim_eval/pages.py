"""Self-contained HTML pages: one style for all of them, everything that is shown inside the file."""

from __future__ import annotations

import base64
import io
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FunctionLoader, StrictUndefined
from PIL import Image

from .video import Frame


def render(template: str, **values: Any) -> str:
    """The page of a template beside this module; texts are escaped, what is not given is an error."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=FunctionLoader(_source)
    )
    environment.filters |= {"percent": percent, "points": points, "p": p_value}
    return environment.get_template(template).render(**values)


def _source(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def write(path: Path, page: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def data_uri(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def png_uri(image: Frame) -> str:
    out = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(out, "PNG", optimize=True)
    return data_uri(out.getvalue(), "image/png")


def percent(share: float) -> str:
    """0.914 -> ``91.4``; whole numbers without a decimal."""
    return f"{100 * share:.1f}".removesuffix(".0")


def points(share: float) -> str:
    """A difference of rates in points, with its sign."""
    return f"{100 * share:+.1f}"


def p_value(p: float) -> str:
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}" if p < 0.1 else f"{p:.2f}"
