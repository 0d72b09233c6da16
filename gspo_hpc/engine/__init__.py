"""vLLM: generation, sleep, restarts, new weights."""
