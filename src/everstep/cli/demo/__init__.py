"""everstep demo: kill the trainer at random moments, compare with an undisturbed run."""
