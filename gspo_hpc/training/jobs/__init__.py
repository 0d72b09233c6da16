"""Jobs of a rank: train, export, evaluate."""
