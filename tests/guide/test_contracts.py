"""The guide's policy and world keep the contracts, by the guide's own test file."""

from __future__ import annotations

from .blocks import module

_mine = module("test_mine.py")
TestReach = _mine.TestReach
TestSteady = _mine.TestSteady
TestPuck = _mine.TestPuck
