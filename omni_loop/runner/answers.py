"""What becomes of a stage's results and errors: typed outputs, typed errors, reports."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import OmniLoopError, Reason, StageFailed
from ..messages import Command, Failed
from ..stage import Outputs


def failure(request: int, command: Command, error: BaseException) -> Failed:
    """The report of what a command met. Public text names the kind of a foreign error only: its message may hold
    paths or another session's data."""
    if isinstance(error, OmniLoopError):
        detail = "".join(traceback.format_exception(error)) if error.__cause__ is not None else ""
        return Failed(
            request,
            error.code,
            error.reason,
            error.retryable,
            error.text,
            detail,
            error.retry_after_ms,
            error.missing_bytes,
        )
    text = f"the runner failed at {type(command).__name__}: {type(error).__name__}"
    detail = "".join(traceback.format_exception(error))
    return Failed(request, StageFailed.code, StageFailed.reason, False, text, detail)


def check_count(stage: str, results: Sequence[Any], items: int) -> None:
    """Raises StageFailed unless there is a result per item."""
    try:
        count = len(results)
    except TypeError:
        text = f"stage {stage!r} gave a {type(results).__name__}, not a result per item"
        raise StageFailed(text, reason=Reason.BAD_OUTPUT) from None
    if count != items:
        text = f"stage {stage!r} gave {count} results for {items} item{'s' * (items > 1)}"
        raise StageFailed(text, reason=Reason.BAD_OUTPUT)


def outputs_of(stage: str, result: Any) -> Outputs:
    """``result`` as outputs by name; raises the item's own error."""
    if isinstance(result, BaseException):
        raise public(stage, result)
    if not isinstance(result, Mapping):
        text = f"stage {stage!r} gave a {type(result).__name__}, not outputs by name"
        raise StageFailed(text, reason=Reason.BAD_OUTPUT)
    return result


def public(stage: str, error: BaseException) -> OmniLoopError:
    """A stage's own error, or one that says no more of a foreign one than its kind."""
    if isinstance(error, OmniLoopError):
        return error
    if not isinstance(error, BaseException):
        text = f"stage {stage!r} gave a {type(error).__name__}, not an error or None"
        return StageFailed(text, reason=Reason.BAD_OUTPUT)
    shown = StageFailed(f"stage {stage!r} failed: {type(error).__name__}")
    shown.__cause__ = error
    return shown
