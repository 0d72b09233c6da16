"""Agreement of engine and trainer: how far their log-probs may differ, and why they do."""
