"""How many examples a property test tries: hypothesis chooses others at each run."""

import os


def examples(count: int) -> int:
    """A third of `count`; all of them under `make test-slow`."""
    if os.environ.get("EVERSTEP_EXAMPLES") == "all":
        return count
    return max(count // 3, min(count, 5))
