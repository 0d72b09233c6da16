"""Uses that commands and Python files make of the arguments that they are given."""
