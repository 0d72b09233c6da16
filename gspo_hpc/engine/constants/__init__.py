"""Numbers beside its weights by which the model of a vLLM worker computes."""
