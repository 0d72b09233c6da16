"""Private interfaces of submitit that this package relies on, in one place.

``submitit.slurm.slurm.SlurmExecutor`` is documented only through AutoExecutor, which cannot write a script without
submitting it. Everything below that begins with an underscore, and the names of the files that submitit leaves in its
folder, may change with any release: tests/unit/launch/test_compat.py checks them for the versions of TESTED.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

TESTED = ("1.5.2", "1.5.3", "1.5.4")  # releases of submitit

_OPTION = "#SBATCH "
# A batch script has these once: it runs on the first component.
_OF_THE_JOB = re.compile(r"#SBATCH --(?:job-name|output|error|open-mode)\b")
_SBATCH_ERROR = re.compile(r"sbatch: (error|fatal): ")


class Executor(SlurmExecutor):
    """submitit's executor, which also writes a batch script where Slurm is not installed."""

    _beside: Executor | None = None

    @classmethod
    def affinity(cls) -> int:
        """Return the value that submitit gives a machine with Slurm. If there is none, sbatch reports it later."""
        return 2

    def ask_beside(self, other: Executor) -> None:
        """Have the job be a heterogeneous one, whose next component has the options of `other`."""
        self._beside = other

    def script(self, command: str | None = None) -> str:
        """Return the batch script that runs `command`; by default the one that :meth:`hand_in` submits."""
        return str(self._make_submission_file_text(self._submitit_command_str if command is None else command, ""))

    def hand_in(self, task: Callable[[], None]) -> str:
        """Submit `task` and return Slurm's id of the job. Raises SubmitError with what sbatch wrote."""
        return self._send(lambda: self.submit(task))

    def name_files_by_task(self) -> None:
        """Name the logs as submitit names those of an array; which tasks there are is up to the caller."""
        self.parameters["map_count"] = 1

    def hand_in_script(self, command: str) -> str:
        """Submit the script that runs `command`, and return Slurm's id. Raises SubmitError with what sbatch wrote."""
        return self._send(lambda: self._submit_command(command))

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        """Return submitit's script, with the options of another component behind its own."""
        text = super()._make_submission_file_text(command, uid)
        if self._beside is None:
            return text
        theirs = self._beside._make_submission_file_text(command, uid)
        options = [line for line in theirs.splitlines() if line.startswith(_OPTION) and not _OF_THE_JOB.match(line)]
        before, last, after = text.rpartition(f"\n{_OPTION}")
        own, _, rest = after.partition("\n")
        return f"{before}{last}{own}\n" + "\n".join([f"{_OPTION.strip()} hetjob", *options, rest])

    def _send(self, submit: Callable[[], Any]) -> str:
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # sbatch's messages are in the exception, too
                return str(submit().job_id)
        except (FailedJobError, FailedSubmissionError) as error:
            lines = [line.strip() for line in str(error).splitlines() if _SBATCH_ERROR.match(line.strip())]
            raise SubmitError(lines[-1] if lines else str(error).strip()) from None


class SubmitError(RuntimeError):
    """A submission that sbatch did not confirm; the text is sbatch's."""


def adopt(folder: Path, job_id: str) -> None:
    """Rename the files of a submission as submitit does once it knows the job's id; the job looks for that name."""
    for pickle in folder.glob("*.pkl"):
        pickle.rename(folder / f"{job_id}_submitted.pkl")
    for script in folder.glob(".submission_file_*.sh"):
        script.rename(folder / f"{job_id}_submission.sh")


def discard(folder: Path) -> None:
    """Remove the files of a submission that Slurm did not take."""
    for left in [*folder.glob("*.pkl"), *folder.glob(".submission_file_*.sh")]:
        left.unlink()
