"""How the bytes of pieces are encoded before they are stored: lossless, and without torch."""

WORTH = 0.9
"""An encoding is used, of a plane or of the whole, only if it is at most this part of the raw."""
