"""How the bytes of pieces are encoded before they are stored: lossless, and without torch."""
