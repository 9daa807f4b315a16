"""A save of several ranks, and of several nodes."""
