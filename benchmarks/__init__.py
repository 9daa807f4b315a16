"""everstep beside its peers, and beside its own code of before: `python -m benchmarks --help`."""
