"""The HTML page about one run."""
