"""Starting a run on this machine, watching it, and telling how it ended."""
