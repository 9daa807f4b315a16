"""Checkpoints in a store: write, commit, read, verify, retain."""
