"""The plan of a run: batch arithmetic, layout, memory and time."""
