from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from omni_loop.connect.base import Connector, Outcome, outcome_of
from omni_loop.connect.segments import MAX_IDLE, Segments, new_prefix, sweep
from omni_loop.connect.shm import ShmConnector
from omni_loop.errors import Exhausted, PayloadError, Reason, TensorError
from omni_loop.messages import PayloadKind, Receipt
from omni_loop.stage import Payload
from omni_loop.testing.connector_contract import ConnectorContract, payload_key, refused

SHM = Path("/dev/shm")
needs_listing = pytest.mark.skipif(not SHM.is_dir(), reason="shared memory has no directory here")


def flip_last_byte(receipt: Receipt) -> None:
    path = SHM / receipt.location.removeprefix("/").split(":")[0]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))


def names(prefix: str) -> list[str]:
    return sorted(p.name for p in SHM.iterdir() if f"/{p.name}".startswith(prefix))


def put(connector: ShmConnector, tick: int = 1) -> Receipt:
    return connector.put(payload_key(tick), Payload(PayloadKind.LATENTS, {"a": np.arange(100, dtype=np.float32)}))


class TestShm(ConnectorContract):
    shared = True

    def make(self) -> Connector:
        return ShmConnector()

    def damage(self, receipt: Receipt) -> None:
        flip_last_byte(receipt)


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
def test_a_segment_is_used_again_and_unlinked_by_close() -> None:
    connector = ShmConnector()
    for tick in range(50):
        put(connector, tick)
        connector.cleanup(payload_key(tick))
    assert len(names(connector.prefix)) == 1
    put(connector, 50)
    put(connector, 50)  # the one before is replaced, and free
    assert len(names(connector.prefix)) == 2
    connector.close()
    assert names(connector.prefix) == []


@needs_listing
def test_no_more_than_some_segments_are_kept_for_later() -> None:
    connector = ShmConnector()
    for tick in range(MAX_IDLE + 10):
        put(connector, tick)
    assert len(names(connector.prefix)) == MAX_IDLE + 10
    connector.cleanup_session("s")
    assert len(names(connector.prefix)) == MAX_IDLE
    connector.close()


def test_a_small_payload_does_not_hold_a_large_segment() -> None:
    segments = Segments(new_prefix())
    large = segments.write(b"", [np.zeros(1 << 20, np.uint8)])
    segments.free(large)
    assert segments.write(b"", [np.zeros(100, np.uint8)]).name != large.name
    assert segments.write(b"", [np.zeros(1 << 19, np.uint8)]).name == large.name
    segments.unlink_all()


def test_what_was_got_stays_when_its_segment_is_used_again() -> None:
    connector, reader = ShmConnector(), ShmConnector()
    old = put(connector, 1)
    got = reader.get(old).arrays["a"]
    connector.cleanup(payload_key(1))
    new = connector.put(payload_key(2), Payload(PayloadKind.LATENTS, {"a": np.full(100, 7, np.float32)}))
    assert new.location.split(":")[0] == old.location.split(":")[0]
    np.testing.assert_array_equal(got, np.arange(100))
    assert refused(lambda: reader.get(old)) is Outcome.GONE
    np.testing.assert_array_equal(reader.get(new).arrays["a"], np.full(100, 7))
    connector.close()


def test_a_reader_beside_a_busy_writer_gets_the_payload_or_hears_that_it_is_gone() -> None:
    """Every payload holds its tick throughout; a reader that comes too late must never see another's numbers."""
    connector, reader = ShmConnector(), ShmConnector()
    receipts: list[Receipt] = []
    done = threading.Event()

    def write() -> None:
        for tick in range(400):
            values = np.full(20_000, tick, np.int32)
            receipts.append(connector.put(payload_key(tick), Payload(PayloadKind.TOKENS, {"t": values})))
            connector.cleanup(payload_key(tick))
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    outcomes: Counter[str] = Counter()
    while not done.is_set():
        if receipts:
            receipt = receipts[-1]
            try:
                values = reader.get(receipt).arrays["t"]
                assert (values == receipt.key.tick).all()
                outcomes["ready"] += 1
            except PayloadError as error:
                outcomes[outcome_of(error)] += 1
    writer.join()
    assert set(outcomes) <= {"ready", Outcome.GONE}, outcomes
    connector.close()


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
    path = SHM / receipt.location.removeprefix("/").split(":")[0]
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        assert refused(lambda: reader.get(receipt)) is Outcome.CORRUPT, at
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        assert refused(lambda: reader.get(receipt)) is Outcome.CORRUPT, size
    path.write_bytes(whole + bytes(64))  # a segment may be longer than its payload
    np.testing.assert_array_equal(reader.get(receipt).arrays["t"], np.arange(9))
    path.write_bytes(whole)
    np.testing.assert_array_equal(reader.get(receipt).arrays["t"], np.arange(9))
    connector.close()


@needs_listing
def test_a_full_memory_is_said_and_what_lies_idle_is_given_back_first(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = ShmConnector()
    put(connector)
    connector.cleanup(payload_key())
    idle = names(connector.prefix)
    write = os.pwrite

    def full(fd: int, data: bytes, at: int) -> int:
        return _no_room(fd, data, at) if idle[0] in names(connector.prefix) else write(fd, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    large = Payload(PayloadKind.LATENTS, {"a": np.zeros(100_000, np.float32)})
    receipt = connector.put(payload_key(2), large)  # the second time, when the idle one was unlinked
    assert idle[0] not in names(connector.prefix)
    monkeypatch.setattr(os, "pwrite", _no_room)
    with pytest.raises(Exhausted) as caught:
        connector.put(payload_key(3), large)
    assert caught.value.reason is Reason.OUT_OF_BYTES
    monkeypatch.undo()
    assert len(names(connector.prefix)) == 1
    connector.get(receipt)
    connector.close()


def _no_room(fd: int, data: bytes, at: int) -> int:
    raise OSError(errno.ENOSPC, "full")


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
