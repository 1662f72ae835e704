"""Fetch: a seven-joint arm with a gripper picks a cube up and carries it to a goal."""
