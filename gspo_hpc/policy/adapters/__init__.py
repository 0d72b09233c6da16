"""Adapters: small matrices that are trained beside the model's own weights, which stay as they are."""
