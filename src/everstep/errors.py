"""Every error that everstep raises on purpose; wrong arguments are ValueError or TypeError."""


class EverstepError(Exception):
    """The root of everstep's errors."""


class Missing(EverstepError):
    """No such store, checkpoint, tensor or tag."""


class Corrupt(EverstepError):
    """Stored bytes differ from their digest, are truncated, or are not what the format says."""


class Conflict(EverstepError):
    """The step exists with other content, or a newer writer has taken the store over."""


class Unavailable(EverstepError):
    """Storage, keeper or memory did not answer or has no room."""


class Mismatch(EverstepError):
    """The state and the checkpoint differ in names, shapes or dtypes."""


class Unsupported(EverstepError):
    """Something that cannot be captured, read or replayed."""


KINDS: dict[str, type[EverstepError]] = {
    kind.__name__: kind for kind in (Missing, Corrupt, Conflict, Unavailable, Mismatch, Unsupported)
}


def kind_of(error: Exception) -> str:
    """Which of these it is, to be told to another process; Unavailable where it is none."""
    found = (name for name, kind in KINDS.items() if isinstance(error, kind))
    return next(found, Unavailable.__name__)
