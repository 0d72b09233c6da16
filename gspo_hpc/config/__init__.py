"""Settings of a run: their schema, their files, and what follows from them."""
