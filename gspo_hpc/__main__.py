"""``python -m gspo_hpc``: the command line, wherever the script is not on PATH."""

import sys

from gspo_hpc.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
