#!/bin/bash

# Parameters
#SBATCH --cpus-per-task=4
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
export PYTHONPATH=/runs/demo/jobs/NNNN/code.zip
export PYTHONSAFEPATH=1
export GSPO_HPC_CODE=/runs/demo/jobs/NNNN/code.zip
export GSPO_HPC_JOB_BEGAN="$(date +%s)"
set +e

# command
export SUBMITIT_EXECUTOR=slurm
/opt/python -P -u -m submitit.core._submit /runs/demo/jobs/NNNN


# teardown
status=$? tries=4
while [ "$status" -gt 128 ] && [ "$status" -ne 130 ] && [ "$tries" -gt 0 ]; do
    echo "gspo-hpc: signal $((status - 128)) ended the supervisor: starting another"
    before=$(ls /runs/demo/attempts)
    GSPO_HPC_KILLED="$status" /opt/python -u -P -m gspo_hpc.launch.slurm.supervisor /runs/demo /runs/demo/jobs/NNNN
    status=$?
    if [ "$before" = "$(ls /runs/demo/attempts)" ]; then tries=$((tries - 1)); else tries=4; fi
done
exit "$status"

# The job starts every attempt with
#   srun --nodes=2 --ntasks=8 --ntasks-per-node=4 --kill-on-bad-exit=1 --distribution=block:block --export=ALL --cpus-per-task=4 --gpu-bind=none /opt/python -P -m gspo_hpc.training.worker train /runs/demo
# and these in its environment:
#   OMP_NUM_THREADS=4
#   PYTHONPATH=/runs/demo/jobs/NNNN/code.zip
#   PYTHONSAFEPATH=1
#   GSPO_HPC_CODE=/runs/demo/jobs/NNNN/code.zip
#   PYTHONUNBUFFERED=1
