"""Several sources of prompts: which rows of each are used, and how they are mixed."""
