"""Server mode: ranks that train, and ranks that generate for them on GPUs or nodes of their own."""
