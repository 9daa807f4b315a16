"""What the optimizers consumed, noted while training; and its replay."""
