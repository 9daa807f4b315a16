"""The keeper: a process without torch that owns the memory tier and all that comes after capture."""
