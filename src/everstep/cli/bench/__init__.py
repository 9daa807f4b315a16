"""everstep bench: beside its peers, in turn, on one machine."""
