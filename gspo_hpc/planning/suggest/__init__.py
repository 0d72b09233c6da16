"""The parts of `gspo-hpc suggest`: ways to cut a model, ways to save memory, and what to change where nothing fits."""
