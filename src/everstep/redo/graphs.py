"""CUDA graphs: what is called while one is captured is not done then, but at each replay, which
writes to the same memory with no hook, and with nothing that counts a version."""

import torch


def is_capturing() -> bool:
    """Whether the current stream is being captured, so that nothing that is called happens now, and
    no Python runs when it does."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
