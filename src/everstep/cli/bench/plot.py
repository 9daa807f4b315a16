"""Matplotlib for the pictures of the bench: an extra, so it is loaded when one is drawn."""

from typing import Any

from everstep.errors import Unsupported


def load_pyplot() -> Any:
    """matplotlib.pyplot, which draws into files and needs no display.

    Raises Unsupported where matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise Unsupported(
            "drawing the bench: matplotlib is missing. Install it with: pip install everstep[bench]"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
