"""The keeper: a process without torch that owns all that comes after capture."""
