"""Where bytes lie: a directory, or a bucket; and what a restore can read from."""
