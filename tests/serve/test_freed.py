"""A server of gRPC's that is freed without having run leaves no record that holds it: pytest keeps every record."""

from __future__ import annotations

import asyncio
import gc
import logging

import grpc.aio
import pytest

import omni_loop.serve.app  # noqa: F401  which quiets it


def test_a_server_that_never_ran_is_in_no_record(caplog: pytest.LogCaptureFixture) -> None:
    async def make() -> None:
        grpc.aio.server()

    with caplog.at_level(logging.DEBUG):
        asyncio.run(make())
        gc.collect()
    assert not [record for record in caplog.records if "dealloc" in record.msg]
