"""Make words of what a shell expands: splitting, parameters and patterns."""
