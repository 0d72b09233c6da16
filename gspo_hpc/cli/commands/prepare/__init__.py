"""Commands for what comes before a run: configs, the machine, and the shell."""
