"""Reading of what users write: YAML, times, and the places where settings stand."""
