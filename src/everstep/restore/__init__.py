"""From a checkpoint to the state: which bytes, from where, verified on the way."""
