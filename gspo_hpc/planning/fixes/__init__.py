"""Settings that make a refused plan valid."""
