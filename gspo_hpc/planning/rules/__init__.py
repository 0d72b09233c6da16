"""Rules that a plan must keep, each with its reason."""
