"""Trackers: readers of metrics.jsonl that send its records elsewhere, during a run and after it."""
