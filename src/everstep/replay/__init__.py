"""Redo records → the state after them, by the user's own optimizers."""
