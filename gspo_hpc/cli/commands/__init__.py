"""Commands, one file each: their arguments and what they do."""
