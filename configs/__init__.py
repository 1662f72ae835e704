"""Shipped deployments (serve), suites (eval) and recipes (train): YAML as package data."""
