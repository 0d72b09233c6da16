"""Pages in the terminal: results laid out for a person."""
