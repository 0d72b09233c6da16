"""Reward functions and the process pool that calls them."""
