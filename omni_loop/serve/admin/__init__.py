"""Liveness, readiness, metrics, sessions and a live page over HTTP, for this machine alone."""

from .server import start as start
