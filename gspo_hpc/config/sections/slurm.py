"""The section about a job on Slurm, with that of its container."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from gspo_hpc.config.reading import slurm_time
from gspo_hpc.config.reading.config_yaml import Ambiguous
from gspo_hpc.config.section import (
    MOST,
    WHOLE,
    Count,
    Lines,
    Matching,
    OneLine,
    OptionsAsText,
    SbatchText,
    Section,
    TextByName,
    key,
)


class Container(Section):
    """The container of the ranks. Its image has the package's dependencies; the code comes from the job folder."""

    kind: Literal["pyxis", "apptainer"] = key(..., "What starts the container.")
    image: OneLine = key(..., "The image.")
    mounts: Lines = key((), "SOURCE:TARGET pairs; the run directory is always mounted.")
    python: OneLine = key("python3", "The interpreter inside the container.")
    args: Lines = key((), "More arguments of srun (pyxis) or of apptainer exec.")


def _minutes(value: Any) -> Any:
    """Return the minutes of a time as Slurm writes it, as Slurm rounds them; other values are left as they are."""
    text = value.text if isinstance(value, Ambiguous) else value
    if not isinstance(text, str):
        return text
    minutes = slurm_time.parse_minutes(text) if slurm_time.LIMIT.fullmatch(text) else None
    if minutes is None:
        raise ValueError(f"must be minutes or a time as Slurm writes it: {slurm_time.FORMS}; found {text!r}")
    return math.ceil(minutes)


_TIME_SCHEMA: dict[str, Any] = {"type": ["integer", "string"], "pattern": rf"^(?:{slurm_time.LIMIT.pattern})$(?!\n)"}
TimeLimit = Annotated[int, Field(ge=1, le=MOST, json_schema_extra=_TIME_SCHEMA), WHOLE, BeforeValidator(_minutes)]


_SIZE = Matching(r"\d+([KMGTkmgt][Bb]?)?", "must be a size as Slurm writes it: 900G, 64000M, or 0 for all of a node")


class Slurm(Section):
    """Arguments of sbatch and srun, with which `submit` asks Slurm for a job.

    A profile is a config with such a section, for all runs on one cluster. The run's own config overrides it.
    """

    profile: OneLine | None = key(
        None, "A profile: a file, or the name of one in slurm/profiles or of one that comes with the package."
    )
    partition: SbatchText | None = key(None, "sbatch --partition.")
    account: SbatchText | None = key(None, "sbatch --account.")
    qos: SbatchText | None = key(None, "sbatch --qos.")
    time_minutes: TimeLimit = key(
        60,
        "Minutes of one job, or a time as Slurm writes it (24:00:00, 1-12:00:00); a longer run is requeued until its "
        "last step is done.",
    )
    signal_seconds: Annotated[int, Field(ge=1, le=65535), WHOLE] = key(  # Slurm takes no more
        120, "Seconds before the time limit at which the ranks are asked to stop."
    )
    requeue: bool = key(True, "Requeue the job until the run is done.")
    constraint: SbatchText | None = key(None, "sbatch --constraint.")
    reservation: SbatchText | None = key(None, "sbatch --reservation.")
    exclude: SbatchText | None = key(None, "sbatch --exclude.")
    nodelist: SbatchText | None = key(None, "sbatch --nodelist.")
    exclusive: bool = key(False, "sbatch --exclusive.")
    cpus_per_task: Count | None = key(
        None,
        "sbatch --cpus-per-task: cores of a rank. By default on GPUs those of a node's busy processes (ranks, engines, "
        "reward functions), shared out over its ranks.",
    )
    mem: Annotated[str, _SIZE] | None = key(None, "sbatch --mem.")
    gres: SbatchText | None = key(None, "sbatch --gres, instead of --gpus-per-node.")
    gpu_bind: SbatchText | None = key(None, "srun --gpu-bind.")
    generation_partition: SbatchText | None = key(
        None,
        "sbatch --partition for cluster.generation_nodes, as a component of a heterogeneous job; the default is "
        "`partition`.",
    )
    generation_constraint: SbatchText | None = key(None, "The same for --constraint; the default is `constraint`.")
    generation_gres: SbatchText | None = key(None, "The same for --gres; the default is `gres`.")
    generation_sbatch: OptionsAsText = key(
        {},
        "More options of sbatch for cluster.generation_nodes, as a component of a heterogeneous job. They are added to "
        "those of the other nodes, or replace them; `nodelist` is for the other nodes alone.",
    )
    mail_user: SbatchText | None = key(None, "sbatch --mail-user.")
    mail_type: SbatchText | None = key(None, "sbatch --mail-type.")
    comment: SbatchText | None = key(None, "sbatch --comment.")
    sbatch: OptionsAsText = key({}, "More options of sbatch: their names without dashes, and their values.")
    srun: Lines = key((), "More arguments of srun.")
    modules: Lines = key((), "Environment modules to load (module load NAME).")
    setup: Lines = key((), "Lines of shell that run before anything else in the job.")
    environment: TextByName = key({}, "Environment variables of the ranks.")
    python: OneLine | None = key(None, "The interpreter that runs the job; the default is the one that submits.")
    container: Container | None = key(None, "The container that ranks run in.")
