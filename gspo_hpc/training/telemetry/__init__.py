"""Measurements of a rank, and where they are sent."""
