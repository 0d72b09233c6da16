"""Memory and time of a run, estimated by phase."""
