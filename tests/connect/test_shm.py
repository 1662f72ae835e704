from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from omni_loop.connect.base import Connector, Outcome
from omni_loop.connect.shm import ShmConnector, new_prefix, sweep
from omni_loop.errors import TensorError
from omni_loop.messages import PayloadKind, Receipt
from omni_loop.stage import Payload
from omni_loop.testing.connector_contract import ConnectorContract, payload_key, refused

SHM = Path("/dev/shm")
needs_listing = pytest.mark.skipif(not SHM.is_dir(), reason="shared memory has no directory here")


def names(prefix: str) -> list[str]:
    return sorted(p.name for p in SHM.iterdir() if f"/{p.name}".startswith(prefix))


def put(connector: ShmConnector, tick: int = 1) -> Receipt:
    return connector.put(payload_key(tick), Payload(PayloadKind.LATENTS, {"a": np.arange(100, dtype=np.float32)}))


class TestShm(ConnectorContract):
    shared = True

    def make(self) -> Connector:
        return ShmConnector()


def test_tensors_come_out_as_arrays() -> None:
    one, two = ShmConnector(), ShmConnector()
    tensor = torch.arange(6, dtype=torch.float32, requires_grad=True).reshape(2, 3).t()
    receipt = one.put(payload_key(), Payload(PayloadKind.KV, {"t": tensor}))
    for connector in (one, two):
        got = connector.get(receipt).arrays["t"]
        assert isinstance(got, np.ndarray)
        np.testing.assert_array_equal(got, tensor.detach().numpy())
    one.close()


@pytest.mark.parametrize("value", [torch.zeros(2, dtype=torch.bfloat16), np.array(["a"]), np.array([object()])])
def test_what_cannot_travel_is_refused_and_leaves_no_name(value: object) -> None:
    connector = ShmConnector()
    with pytest.raises(TensorError, match="'t'"):
        connector.put(payload_key(), Payload(PayloadKind.KV, {"t": value}))
    assert names(connector.prefix) == []


@needs_listing
def test_names_are_unlinked_by_cleanup_replacement_and_close() -> None:
    connector = ShmConnector()
    put(connector)
    put(connector)
    assert len(names(connector.prefix)) == 1
    put(connector, 2)
    connector.cleanup(payload_key(1))
    assert len(names(connector.prefix)) == 1
    connector.close()
    assert names(connector.prefix) == []


@needs_listing
def test_names_are_unlinked_when_the_connector_is_forgotten() -> None:
    connector = ShmConnector()
    prefix = connector.prefix
    put(connector)
    del connector
    gc.collect()
    assert names(prefix) == []


@needs_listing
def test_every_flipped_or_missing_byte_is_found() -> None:
    connector, reader = ShmConnector(), ShmConnector()
    receipt = connector.put(payload_key(), Payload(PayloadKind.TOKENS, {"t": np.arange(9)}, {"x": 1}))
    path = SHM / receipt.location.removeprefix("/")
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        assert refused(lambda: reader.get(receipt)) is Outcome.CORRUPT, at
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        assert refused(lambda: reader.get(receipt)) is Outcome.CORRUPT, size
    path.write_bytes(whole + bytes(64))
    assert refused(lambda: reader.get(receipt)) is Outcome.CORRUPT
    path.write_bytes(whole)
    np.testing.assert_array_equal(reader.get(receipt).arrays["t"], np.arange(9))
    connector.close()


def test_a_segment_of_another_key_is_corrupt() -> None:
    connector, reader = ShmConnector(), ShmConnector()
    one, two = put(connector, 1), put(connector, 2)
    forged = Receipt(one.key, one.kind, one.connector, two.location, one.nbytes)
    assert refused(lambda: reader.get(forged)) is Outcome.CORRUPT
    connector.close()


CHILD = """
import os, signal, sys
import numpy as np
from omni_loop.connect.shm import ShmConnector
from omni_loop.messages import PayloadKey, PayloadKind
from omni_loop.stage import Payload
connector = ShmConnector(sys.argv[1])
for tick in range(3):
    connector.put(PayloadKey("e", "s", 0, tick), Payload(PayloadKind.TOKENS, {"t": np.arange(9)}))
if sys.argv[2] == "killed":
    print("ready", flush=True)
    signal.pause()
"""


@needs_listing
def test_exit_without_close_leaves_no_name_and_no_warning() -> None:
    prefix = new_prefix()
    done = subprocess.run([sys.executable, "-c", CHILD, prefix, "exit"], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
    assert names(prefix) == []


@needs_listing
def test_a_killed_process_is_swept() -> None:
    prefix = new_prefix()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, prefix, "killed"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert child.stdout is not None
    child.stdout.readline()
    assert len(names(prefix)) == 3
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    sweep(prefix)
    assert names(prefix) == []


@needs_listing
def test_sweeping_leaves_other_prefixes_alone() -> None:
    connector = ShmConnector()
    put(connector)
    assert sweep(new_prefix()) == 0
    assert len(names(connector.prefix)) == 1
    connector.close()
