"""What Python 3.10 lacks of the 3.12 this project is written in."""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    from enum import StrEnum
else:
    from enum import Enum

    class StrEnum(str, Enum):
        """As in 3.11: formats as its value."""

        __str__ = str.__str__
        __format__ = str.__format__


__all__ = ["StrEnum"]
