"""LeRobot's own environments (``lerobot.envs``), by their config names."""
