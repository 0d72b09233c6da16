"""Symptoms of a run that is wrong or slow, found in its run directory."""
