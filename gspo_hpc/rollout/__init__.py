"""Generation and grading of one rollout on all engines."""
