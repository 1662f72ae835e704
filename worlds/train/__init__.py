"""Trainers of the world-side models, found by name through the registry."""
