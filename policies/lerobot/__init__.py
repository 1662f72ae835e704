"""LeRobot's policies behind our stages: checkpoints by folder, by a shipped name or by hub id."""
