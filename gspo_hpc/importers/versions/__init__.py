"""Defaults that other versions of a project have, where a run may be of one of these."""
