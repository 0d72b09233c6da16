"""Turn signals into a flag that the training loop checks at its safe points.

A Python signal handler does not run while the main thread is inside a collective, however long that takes. So the
signals are blocked, and one thread waits for them with sigwait, which returns at once.

Two things interfere with blocked signals; neither may lose a signal or end the process. A child inherits the mask of
the thread that starts it: start children inside :func:`signals_default_in_children`. The resource tracker of
multiprocessing unblocks SIGINT and SIGTERM in the thread that starts it: so a handler raises the same flag, and the
signals are blocked again whenever the flag is checked. An executed child does not inherit handlers.
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

from gspo_hpc.system.exit_codes import INTERRUPTED

MEMORY = "memory"  # not a signal: the reason to stop of a run that starts again before its memory runs out
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


class StopFlag:
    """A flag that the first SIGTERM, SIGUSR1, SIGUSR2 or SIGINT sets.

    A second SIGINT ends the process at once, or, with ``exit_on_second_interrupt=False``, only sets `forced`.
    """

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
        """Start to listen. Call it in the main thread before other threads start: they inherit the blocked mask."""
        assert threading.current_thread() is threading.main_thread()
        self._mask = {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)}
        self._handlers = {number: signal.signal(number, self._handle) for number in SIGNALS}
        self._thread.start()
        return self

    @property
    def requested(self) -> str | None:
        """Name of the first signal, such as "SIGTERM", or the reason given to :meth:`request`. Main thread only.

        It blocks the signals again, from :meth:`start` to :meth:`close`.
        """
        if self._thread.ident is not None and not self._closing:
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        return self._name

    @property
    def name(self) -> str | None:
        """The same as `requested`, for any thread."""
        return self._name

    @property
    def hurried(self) -> bool:
        """True if the flag is set, and not only for memory, which is left for a while yet. Main thread only."""
        reason = self.requested
        return reason is not None and not reason.startswith(MEMORY)

    def request(self, reason: str) -> None:
        """Set the flag without a signal, from any thread."""
        if self._name is None:
            self.requested_at = time.time()
            self._name = reason

    def close(self) -> None:
        """Stop listening, and restore mask and handlers. Main thread only."""
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
                os.write(2, b"interrupted twice: ending now, without saving\n")
                os._exit(INTERRUPTED)


@contextlib.contextmanager
def signals_default_in_children() -> Iterator[None]:
    """Give processes that this thread starts inside the block default signal actions, and none of the signals blocked.

    A signal that comes meanwhile still sets the flag, through its handler.
    """
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
