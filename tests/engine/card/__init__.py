"""A GPU that only counts, and vLLM's own Python wired up around it."""
