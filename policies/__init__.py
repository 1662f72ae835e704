"""Policies: the embedded action-chunk head."""
