"""What runs in a worker process: one env behind a socket.

These files need Python 3.10 and numpy, and nothing of this project: they also run in the environment of a simulator
whose pins conflict with ours, where they are started by their path. Only the adapters import more.
"""
