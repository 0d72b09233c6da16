"""Experts' weights on their way into the layers of vLLM's workers."""
