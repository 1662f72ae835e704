"""Bytes of session state: what may be used on each device, and what is used, every storage counted once.

One ledger serves every runner of a process that is given it. Pools and reservations are plain amounts; tensors that
may be shared (versions kept to go back to, forks) are held by storage: the first holder pays, the last one is paid
back. Everything is O(1).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ..errors import Exhausted, Reason


class Account:
    """One device's bytes. ``limit`` is hard for :meth:`charge`; what :meth:`hold` adds can be given up at any time,
    so its owner looks at :attr:`over` and gives up until nothing is."""

    __slots__ = ("_charged", "_held", "_lock", "_storages", "device", "limit")

    def __init__(self, device: str, limit: int) -> None:
        self.device, self.limit = device, limit
        self._charged = 0
        self._held = 0
        self._storages: dict[int, int] = {}  # address -> holders
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        return self._charged + self._held

    @property
    def held(self) -> int:
        """Of ``used``, bytes of storages held."""
        return self._held

    @property
    def over(self) -> int:
        """Bytes used beyond the limit."""
        return max(0, self.used - self.limit)

    @property
    def left(self) -> int:
        """Bytes that can still be charged."""
        return max(0, self.limit - self.used)

    def missing(self, nbytes: int) -> int:
        """Bytes by which ``nbytes`` more would pass the limit; 0 when they fit."""
        return max(0, self.used + nbytes - self.limit)

    def charge(self, nbytes: int, what: str) -> None:
        """Take ``nbytes``, or nothing.

        Raises:
            Exhausted: they do not fit; ``what`` names who asked, ``missing_bytes`` says by how much.
        """
        with self._lock:
            if missing := self.missing(nbytes):
                text = f"{what} needs {nbytes} bytes of state, {missing} more than left"
                raise Exhausted(text, reason=Reason.OUT_OF_BYTES, missing_bytes=missing)
            self._charged += nbytes

    def credit(self, nbytes: int) -> None:
        with self._lock:
            self._charged -= nbytes

    def hold(self, tensors: Iterable[Tensor], nbytes: int) -> None:
        """One more holder of each storage, of ``nbytes`` each. The tensors begin where their storages begin."""
        with self._lock:
            storages = self._storages
            for tensor in tensors:
                address = tensor.data_ptr()
                if address in storages:
                    storages[address] += 1
                else:
                    storages[address] = 1
                    self._held += nbytes

    def release(self, tensors: Iterable[Tensor], nbytes: int) -> None:
        """One holder less of each storage. A storage without holders is forgotten."""
        with self._lock:
            storages = self._storages
            for tensor in tensors:
                address = tensor.data_ptr()
                if storages[address] == 1:
                    del storages[address]
                    self._held -= nbytes
                else:
                    storages[address] -= 1


class Ledger:
    """Accounts by device. ``limits`` in bytes; a device without one cannot be used."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        self.sizing = threading.Lock()  # held by whoever looks at what is left and then takes it
        self._accounts = {name: Account(name, limit) for device, limit in limits.items() for name in [_name(device)]}

    def account(self, device: torch.device | str) -> Account:
        """Raises Exhausted when the device has no budget."""
        name = _name(device)
        if name not in self._accounts:
            raise Exhausted(f"no budget for state on {name!r}", reason=Reason.OUT_OF_BYTES, retryable=False)
        return self._accounts[name]

    def used(self) -> dict[str, int]:
        """Bytes by device."""
        return {name: account.used for name, account in self._accounts.items()}


def _name(device: torch.device | str) -> str:
    """``cuda`` means the first one."""
    device = torch.device(device)
    return device.type if device.type == "cpu" else f"{device.type}:{device.index or 0}"
