"""The run directory: lock, attempts, journal, checkpoints, the code that was submitted."""
