"""From tensors to shared memory: strategies say what, plans where, copiers move it."""
