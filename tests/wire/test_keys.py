"""A key that is not the session's: which one was meant."""

import pytest

from omni_loop.errors import TensorError
from omni_loop.wire.check import check_keys

KNOWN = ("environment_state", "state")


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        (("environment_state", "observation.state"), "state"),  # as a dataset calls it
        (("observation.environment_state", "state"), "environment_state"),
        (("state", "observation.state"), "state"),
        (("environment_state", "stat"), "state"),
        (("state", "env_state"), "environment_state"),  # the one that is missing, not the nearest
        (("state", "statee"), "state"),
        ((*KNOWN, "statee"), "state"),
    ],
)
def test_the_key_that_was_meant(sent: tuple[str, ...], meant: str) -> None:
    with pytest.raises(TensorError, match=rf"unknown observation keys: .* Did you mean '{meant}'\?$"):
        check_keys(KNOWN, sent)
