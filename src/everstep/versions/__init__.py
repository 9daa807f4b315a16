"""Checkpoints beside each other, and made of others: diff, average, merge."""
