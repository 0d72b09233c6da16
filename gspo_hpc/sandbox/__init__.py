"""Programs that a model wrote, run apart: no network, no files of others, little of everything, killed for certain."""
