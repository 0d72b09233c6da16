"""The owner's end of an engine's process: start it, call it, and wait no longer than a limit for what it answers.

The connection is a pair of sockets that only the two processes have, so nothing else can be read from it. Each call is
answered in turn; one more may be on its way while the one before is worked on. Only :mod:`gspo_hpc.engine.engine` uses
this module.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gspo_hpc.engine.messages import Failure
from gspo_hpc.engine.outputs import one_line, root_cause
from gspo_hpc.engine.processes import Processes
from gspo_hpc.system import environment

_POLL_SECONDS = 0.2  # between two checks that the engine's processes are alive
_CLOSE_SECONDS = 3.0  # for an engine that is closed to end by itself


class EngineDied(RuntimeError):
    """Error raised when the engine's processes ended, or hung and were killed; :meth:`Engine.restart` recovers."""


class Client:
    """One process of :mod:`gspo_hpc.engine.host`, and those that it starts. It starts at once, and imports vLLM."""

    def __init__(self, values: Mapping[str, str], log_path: Path | None) -> None:
        """`values` are added to the environment. `log_path` gets the output; by default it is this process's own."""
        self.dead: str | None = None  # the reason
        self.processes = Processes()
        ours, theirs = socket.socketpair()
        with theirs:
            command = environment.python("gspo_hpc.engine.host", str(theirs.fileno()))
            try:
                self.processes.start(command, values, log_path, theirs.fileno())
            except BaseException:
                ours.close()
                raise
        self._connection = Connection(ours.detach())

    def call(self, seconds: float, method: str, *arguments: Any) -> Any:
        """Return what a method of the host answers; see :meth:`post` and :meth:`answer`."""
        try:
            self.post(seconds, method, *arguments)
            return self.answer(seconds)
        except KeyboardInterrupt:
            self.kill("interrupted")  # its answer would be taken for that to the next call
            raise

    def post(self, seconds: float, method: str, *arguments: Any) -> None:
        """Send a call. Raises EngineDied where the engine is dead, or does not take the call in `seconds`."""
        if self.dead is not None:
            raise EngineDied(self.dead)
        self._limit(socket.SO_SNDTIMEO, seconds)
        try:
            self._connection.send((method, arguments))
        except BlockingIOError:
            raise self.kill(f"no answer for {seconds:g} s") from None
        except OSError:
            raise self._gone() from None

    def answer(self, seconds: float) -> Any:
        """Return the answer to the earliest call that has none yet.

        Raises EngineDied where the engine is dead, dies of the call, or does not answer in `seconds`. An error of the
        call itself is raised as ValueError, if it is one over there (or a TypeError), else as RuntimeError.
        """
        deadline = time.monotonic() + seconds
        try:
            while not self._connection.poll(_POLL_SECONDS):
                if (gone := self.processes.gone()) is not None:
                    raise self.kill(f"its process {gone} is gone")
                if time.monotonic() > deadline:
                    raise self.kill(f"no answer for {seconds:g} s")
            self._limit(socket.SO_RCVTIMEO, seconds)
            answer = self._connection.recv()
        except BlockingIOError:
            raise self.kill(f"no answer for {seconds:g} s") from None
        except (EOFError, OSError):
            raise self._gone() from None
        if not isinstance(answer, Failure):
            return answer
        if answer.fatal or self.processes.gone() is not None:
            raise self.kill(one_line(root_cause(self.processes.excerpt()) or answer.text))
        if {"ValueError", "TypeError"} & set(answer.classes):
            raise ValueError(answer.text)
        raise RuntimeError(answer.text)

    def kill(self, reason: str) -> EngineDied:
        """Mark the engine as dead, kill what is left of it, and return the error to raise."""
        if self.dead is None:
            self.dead = reason
            self.processes.kill()
        return EngineDied(self.dead)

    def close(self) -> None:
        """End every process of the engine, by force where they do not end in a few seconds."""
        self._connection.close()  # the host ends what it has started, and itself
        if self.dead is None:
            self.processes.wait(_CLOSE_SECONDS)
        self.processes.kill()

    def _gone(self) -> EngineDied:
        """Return the error to raise where the connection broke: the process at its other end is ending."""
        gone = self.processes.wait_first(_CLOSE_SECONDS)
        reason = root_cause(self.processes.excerpt())
        if reason is not None:
            return self.kill(one_line(reason))
        return self.kill("its connection is closed" if gone is None else f"its process {gone} is gone")

    def _limit(self, option: int, seconds: float) -> None:
        # A process that is stopped reads nothing and sends the half of an answer: neither may block its owner.
        whole = int(seconds)
        limit = struct.pack("@ll", whole, int((seconds - whole) * 1e6))
        with contextlib.closing(socket.socket(fileno=self._connection.fileno())) as end:
            end.setsockopt(socket.SOL_SOCKET, option, limit)
            end.detach()
