"""The processes of the ranks on this machine, and restarts of those that generate."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gspo_hpc.config.derived import restarts_generators, role_of
from gspo_hpc.config.schema import Config
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


def end_all(ranks: Sequence[RankProcess], seconds: float) -> list[str]:
    """End and reap all ranks within so many seconds; return what keeps those that do not end."""
    for rank in ranks:
        rank.kill()  # all before the first is waited for
    deadline = time.monotonic() + seconds
    return [text for rank in ranks if (text := rank.end(deadline)) is not None]


def ending(code: int) -> str:
    """Return how a process ended that has this exit code, or that a signal of this number (negated) ended."""
    if code >= 0:
        return f"ended with exit code {code}"
    hint = " (by hand, or because memory ran out)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


class GeneratorRestarts:
    """Restarts of the ranks that generate, when one of them was killed. Those that train only lose time.

    All of them start again, because those that are left may wait for the lost one in a collective. They are given how
    often that has happened and why; the ranks that train give them their weights and their work (training.serving).
    """

    def __init__(
        self,
        config: Config,
        ranks: list[RankProcess],
        start: Callable[[int, Mapping[str, str]], RankProcess],
        seconds: float,
    ) -> None:
        """Take all ranks, which :meth:`make` changes, and `start`, which starts a rank with these further variables.

        `seconds`: in which a rank must end on SIGKILL.
        """
        self._config, self._ranks, self._start, self._seconds = config, ranks, start, seconds
        self._deaths: list[str] = []

    def make(self, blamed: int, failed: Mapping[int, int], say: Callable[[str], None]) -> bool:
        """Start the ranks that generate again if only such ranks have failed, and the first of them was killed.

        `failed` has exit codes, and `say` is told what is done. Return False, with nothing done, if there is another
        failure, or one too many: an error that a rank reports would come again. Where a rank that trains has ended, the
        attempt is at its end.
        """
        config, limit = self._config, self._config.faults.max_engine_restarts
        generating = [one for one in self._ranks if role_of(config, one.number).generates]
        others = [one for one in self._ranks if one not in generating]
        possible = restarts_generators(config) and failed.keys() <= {one.number for one in generating}
        if not possible or failed[blamed] >= 0 or any(one.exit_code() is not None for one in others):
            return False
        death = f"rank {blamed}, which generates, {ending(failed[blamed])}"
        if len(self._deaths) == limit:
            say(f"{death}, after {limit} such deaths: it is not started again (faults.max_engine_restarts {limit})")
            return False
        if end_all(generating, self._seconds):
            return False
        self._deaths.append(death)
        what = "it starts" if len(generating) == 1 else f"all {len(generating)} ranks that generate start"
        say(f"{death}: {what} again, restart {len(self._deaths)} of at most {limit}, and training goes on")
        for place, one in enumerate(self._ranks):
            if one in generating:
                told = {environment.GENERATOR_DEATHS: json.dumps(self._deaths)}
                self._ranks[place] = self._start(one.number, told)
        return True
