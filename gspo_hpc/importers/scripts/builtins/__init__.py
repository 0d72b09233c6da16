"""Commands that a shell itself has, where they change how a script goes on."""
