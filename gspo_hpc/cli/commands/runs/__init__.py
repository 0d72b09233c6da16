"""Commands that start runs, and that read or end those that are there."""
