"""``python -m gspo_hpc``: the command line, wherever the script is not on PATH."""

import os
import sys

# `python -m` looks for modules in the current folder first. That may be the run directory of somebody else, with a
# torch.py in it. `os` and `sys` are in Python itself.
if not sys.flags.safe_path and sys.path[0] == os.getcwd() != os.path.dirname(os.path.dirname(__file__)):
    del sys.path[0]

from gspo_hpc.cli.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
