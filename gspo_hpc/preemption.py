"""Signals become a flag that the loop asks at its safe points.

Floor 1. A Python signal handler waits while the main thread is inside a collective, for as long as that takes. So the
signals are blocked and one thread waits for them with sigwait, which is served at once. Two things undo a blocked
signal, and neither may lose one or end the process: a child process inherits the mask of the thread that starts it
(start children inside :func:`signals_default_in_children`), and the multiprocessing module's resource tracker unblocks
SIGINT and SIGTERM in the thread that starts it. Hence a handler is installed as well, which raises the same flag, and
the signals are blocked again whenever the flag is asked. Handlers do not survive into an executed child.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


class StopFlag:
    """Set by the first of SIGTERM, SIGUSR1, SIGUSR2, SIGINT. A second SIGINT ends the process at once (exit code 130),
    or with ``exit_on_second_interrupt=False`` only sets `forced`."""

    def __init__(self, *, exit_on_second_interrupt: bool = True) -> None:
        self.requested_at: float | None = None  # seconds since the epoch
        self.forced = False
        self._name: str | None = None
        self._exit = exit_on_second_interrupt
        self._interrupts = 0
        self._closing = False
        self._thread = threading.Thread(target=self._wait, name="stop-flag", daemon=True)
        self._handlers: dict[int, Any] = {}
        self._mask: set[int] = set()

    def start(self) -> StopFlag:
        """Begin to listen. In the main thread and before other threads are started: these inherit the blocked mask."""
        assert threading.current_thread() is threading.main_thread()
        self._mask = {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)}
        self._handlers = {number: signal.signal(number, self._handle) for number in SIGNALS}
        self._thread.start()
        return self

    @property
    def requested(self) -> str | None:
        """The name of the first signal ("SIGTERM") or the reason given to :meth:`request`. In the main thread."""
        if not self._closing:
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        return self._name

    @property
    def name(self) -> str | None:
        """As `requested`, for any thread."""
        return self._name

    def request(self, reason: str) -> None:
        """Raise the flag without a signal. From any thread."""
        if self._name is None:
            self.requested_at = time.time()
            self._name = reason

    def close(self) -> None:
        """Stop listening; mask and handlers are as before :meth:`start`. In the main thread."""
        self._closing = True
        assert self._thread.ident is not None, "not started"
        signal.pthread_kill(self._thread.ident, signal.SIGUSR1)  # to that thread alone: it wakes from sigwait
        self._thread.join()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _wait(self) -> None:
        while True:
            number = signal.sigwait(SIGNALS)
            if self._closing:
                return
            self._note(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._note(number)

    def _note(self, number: int) -> None:
        self.request(signal.Signals(number).name)
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            self.forced = True
            if self._exit:
                os.write(2, b"interrupted twice: ends now, without saving\n")
                os._exit(130)


@contextlib.contextmanager
def signals_default_in_children() -> Iterator[None]:
    """Processes started by this thread inside the block have none of the signals blocked, and their default actions.

    A signal that comes meanwhile still raises the flag, through its handler."""
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
