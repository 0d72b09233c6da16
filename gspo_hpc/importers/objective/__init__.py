"""Carry over objectives: what is minimised, and how the gap between engine and trainer is corrected."""
