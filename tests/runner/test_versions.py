from __future__ import annotations

from omni_loop.runner.state import Budget, StateManager
from omni_loop.testing.state_contract import STAGES
from omni_loop.testing.versions_contract import VersionsContract


class TestVersions(VersionsContract):
    def make(self, max_sessions: int = 4) -> StateManager:
        return StateManager(STAGES, Budget(max_sessions, rewind_ticks=4))
