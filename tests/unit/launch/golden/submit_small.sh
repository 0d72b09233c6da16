#!/bin/bash

# Parameters
#SBATCH --gpus-per-node=4
#SBATCH --job-name=demo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --open-mode=append
#SBATCH --output=/runs/demo/jobs/NNNN/%j_0_log.out
#SBATCH --requeue
#SBATCH --signal=USR2@120
#SBATCH --time=60

# setup
export PYTHONPATH=/runs/demo/jobs/NNNN/code
export PYTHONSAFEPATH=1
export GSPO_HPC_GRADERS=/runs/demo/jobs/NNNN/code/graders

# command
export SUBMITIT_EXECUTOR=slurm
/opt/python -u -m submitit.core._submit /runs/demo/jobs/NNNN

# The job starts every attempt with
#   srun --nodes=2 --ntasks=8 --ntasks-per-node=4 --kill-on-bad-exit=1 --distribution=block:block --export=ALL --gpu-bind=none /opt/python -m gspo_hpc.training.worker train /runs/demo
# and these in its environment:
#   PYTHONPATH=/runs/demo/jobs/NNNN/code
#   PYTHONSAFEPATH=1
#   GSPO_HPC_GRADERS=/runs/demo/jobs/NNNN/code/graders
#   PYTHONUNBUFFERED=1
