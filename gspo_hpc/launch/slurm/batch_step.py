"""The one process of a job that is no run: a module of this package, which its folder tells what to do."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from gspo_hpc.config.schema import Config
from gspo_hpc.launch.slurm import srun


def command(config: Config, module: str, folder: Path, seen: Path, names: Sequence[str] = ()) -> str:
    """Return the command of the batch step; in a container, it is started there by srun.

    `seen`: the directory that it works on; `names`: variables of the shell that submits which must reach it.
    """
    box, code = config.slurm.container, folder / srun.CODE
    if box is None:
        python = config.slurm.python or sys.executable
        return shlex.join([python, "-u", "-P", "-m", module, str(folder)])
    own = [*srun.environment(config, code), *names]
    inside = srun.in_container(box, config.cluster.platform == "cuda", seen, code, own)
    step = ["srun", "--nodes=1", "--ntasks=1", "--export=ALL", *config.slurm.srun]
    return shlex.join([*step, *inside, box.python, "-u", "-P", "-m", module, str(folder)])
