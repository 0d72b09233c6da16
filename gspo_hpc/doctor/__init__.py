"""Checks of what a run needs, made here and on the nodes of a job."""
