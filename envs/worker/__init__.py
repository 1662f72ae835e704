"""Envs in processes of their own: to be safe from their crashes, or because their pins conflict with ours."""
