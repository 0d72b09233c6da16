"""Greedy accuracy, avg@k, pass@k and maj@k on unseen prompts."""
