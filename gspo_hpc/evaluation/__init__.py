"""Greedy accuracy, avg@k and pass@k on unseen prompts."""
