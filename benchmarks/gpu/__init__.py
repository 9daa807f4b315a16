"""What a machine with a CUDA device shows: tests, kills, figures, and unusual ways of training."""
