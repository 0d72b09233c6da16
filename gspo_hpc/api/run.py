"""A run as Python sees it: a view of its directory, which is read anew at every call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_hpc.config.schema import Config
from gspo_hpc.runs import learning, reader
from gspo_hpc.system.terminal import pasteable

if TYPE_CHECKING:
    from gspo_hpc.launch.status import Status
    from gspo_hpc.report.findings import ShownFinding


class Run:
    """A run, finished or not; nothing that it offers changes it, or runs code that its config names."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        """Show the path, the state and the step."""
        data = reader.read_run(self.path)
        worry = f", {self.worry}" if self.worry else ""
        return f"Run({str(self.path)!r}, {data.state}, step {data.steps} of {data.max_steps}{worry})"

    @property
    def config(self) -> Config | None:
        """The config of the latest attempt, or None if it cannot be read."""
        return reader.read_run(self.path).config

    @property
    def state(self) -> str:
        """The end of the latest attempt, such as "done", "stopped" or "failed"; "running" while it goes on."""
        return reader.read_run(self.path).state

    @property
    def failure(self) -> str:
        """The reason for which the latest attempt ended; empty if nothing more is known."""
        attempts = reader.read_run(self.path).attempts
        return attempts[-1].detail if attempts else ""

    @property
    def worry(self) -> str:
        """A clause on what the run has learnt, such as "learnt nothing: ..."; empty if nothing is wrong."""
        found = learning.judge(reader.read_run(self.path).records)
        return "" if found is None else found.worry

    def metrics(self) -> list[dict[str, Any]]:
        """Read the records of all steps, by step.

        Returns:
            The objects of metrics.jsonl: "step", "reward", "loss", "eval/accuracy" where there was an evaluation, and
            the others that docs/metrics.md explains. Numbers that were not finite are None.

        Example:
            >>> run = gspo_hpc.open_run("runs/demo")
            >>> [(record["step"], record["reward"]) for record in run.metrics()]
            [(1, 0.25), (2, 0.5)]
        """
        return [dict(record) for record in reader.read_run(self.path).records]

    def samples(self) -> list[dict[str, Any]]:
        """Read the completions that were kept to look at.

        Returns:
            One dict each: "step", "phase", "prompt", "completion", "reward", "failure" and "answer".

        Example:
            >>> gspo_hpc.open_run("runs/demo").samples()[0]["completion"]
            '12'
        """
        return [dict(row) for row in reader.read_run(self.path).samples]

    def status(self) -> Status:
        """Read the state of the run as ``gspo-hpc status`` shows it. Slurm is asked about the run's job, if it has one.

        Returns:
            State, step, reward, accuracy, speed and the time that is left.

        Example:
            >>> gspo_hpc.open_run("runs/demo").status().step
            2
        """
        from gspo_hpc.launch import status

        return status.read(self.path)

    def report(self, out: str | Path | None = None) -> Path:
        """Write the report page.

        Args:
            out: The HTML file to write; the default is report.html in the run directory.

        Returns:
            The path of the page.

        Raises:
            OSError: The page cannot be written.

        Example:
            >>> gspo_hpc.open_run("runs/demo").report("demo.html").name
            'demo.html'
        """
        from gspo_hpc.report.page import write_report

        return write_report(self.path, None if out is None else Path(out), findings(self.path))


def open_run(path: str | Path) -> Run:
    """Open a run directory to read it.

    Args:
        path: The run directory, such as ``"runs/tiny_cpu"``.

    Returns:
        The run.

    Raises:
        ValueError: There is no run directory at this path.

    Example:
        >>> gspo_hpc.open_run("runs/demo").state
        'new'
    """
    data = reader.read_run(Path(path))
    return Run(data.path)


def findings(run_dir: Path) -> list[ShownFinding]:
    """Return what the diagnosis finds in a run, as the report shows it."""
    from gspo_hpc.diagnose import gather
    from gspo_hpc.report.findings import ShownFinding

    def look(places: Sequence[str]) -> list[str]:
        return [pasteable(place, run_dir) for place in places]

    return [
        ShownFinding(
            one.severity,
            one.name.replace("_", " "),
            one.cause,
            one.evidence,
            one.on_resume,
            one.new_run,
            look(one.look),
        )
        for one in gather.diagnose(run_dir).symptoms
    ]
