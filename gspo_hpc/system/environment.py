"""Names of the environment variables of this package, each with its meaning.

The launcher and the supervisor set them for the processes they start, except for DEBUG, which a user sets. The shell
scripts in tools/ and slurm/ have variables of their own, which their ``--help`` lists.
"""

from __future__ import annotations

DEBUG = "GSPO_HPC_DEBUG"  # set by a user: a refused command also prints its traceback
ATTEMPT = "GSPO_HPC_ATTEMPT"  # number of the attempt that a rank belongs to
RUN_ID = "GSPO_HPC_RUN_ID"  # id of the run that a rank of a Slurm job belongs to
MARK = "GSPO_HPC_MARK"  # RUN_ID:ATTEMPT, in every process of a run, to find what is left of an attempt
PARENT = "GSPO_HPC_PARENT"  # process id of the launcher that started this rank
CONTROL = "GSPO_HPC_CONTROL"  # HOST:PORT of the process that watches this rank
CONTROL_TOKEN = "GSPO_HPC_CONTROL_TOKEN"  # secret that opens a connection to it
GRADERS = "GSPO_HPC_GRADERS"  # folder with the copies of the reward functions' files that were submitted
ENGINE = "GSPO_HPC_ENGINE"  # random token in the processes of one engine, to find them all
ENGINE_OWNER = "GSPO_HPC_ENGINE_OWNER"  # process id of the rank that owns an engine
