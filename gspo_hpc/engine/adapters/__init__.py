"""Adapters beside an engine's weights, in vLLM's own processes."""
