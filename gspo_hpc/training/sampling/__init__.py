"""Rollouts: prompts, completions, rewards, advantages."""
