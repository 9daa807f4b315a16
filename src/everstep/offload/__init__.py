"""An optimizer beside storage: state in shared memory, updates in a process of their own."""
