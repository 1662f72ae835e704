"""MuJoCo is told how to draw before any test of a simulator imports it."""

from omni_loop_envs import headless

headless.prepare()
