"""Records that travel between phases: prompts, completions, packed micro-batches."""
