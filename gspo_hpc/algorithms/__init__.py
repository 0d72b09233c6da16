"""Objectives, the terms that they are made of, and advantages."""
