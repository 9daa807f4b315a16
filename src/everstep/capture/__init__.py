"""From tensors to shared memory: plans, the pool of slots, copiers, and the strategy `full`."""
