"""The process of one rank on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gspo_hpc.system import environment, processes
from gspo_hpc.system.files import open_log
from gspo_hpc.system.signals import signals_default_in_children


class RankProcess:
    """The process of one rank. It is not reaped before :meth:`end`, so the PID cannot be reused."""

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        variables: Mapping[str, str],
        log: Path | None,
        descriptors: Sequence[int] = (),  # of files that the rank gets as well, under the same numbers
    ) -> None:
        self.number = number
        output = None if log is None else open_log(log)
        try:
            with signals_default_in_children():
                self._process = subprocess.Popen(
                    command,
                    env=os.environ | environment.importing() | {**variables, environment.PARENT: str(os.getpid())},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    pass_fds=descriptors,
                )
        finally:
            if output is not None:
                os.close(output)

    def exit_code(self) -> int | None:
        """Return the exit code, minus the number of the signal that ended it, or None while it lives."""
        state = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if state is None:
            return None
        return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status

    def send(self, number: int) -> None:
        """Send a signal to the rank but not to its children, which it ends itself."""
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to the rank and to its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self, deadline: float) -> str | None:
        """Kill what is left of the rank and its children, and reap it; return what keeps it, if something does."""
        self.kill()
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return f"rank {self.number}: {processes.immortal(self._process.pid)}"
        return None
