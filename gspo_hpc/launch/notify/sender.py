"""Sending notifications with apprise, from a thread: neither a run nor its end waits for a service."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

Say = Callable[[str], None]


def unknown(addresses: Sequence[str]) -> list[int]:
    """Return the places, from 1, of the addresses of which apprise knows no service; none where it is not installed."""
    try:
        import apprise
    except ModuleNotFoundError:
        return []
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)  # its lines show addresses
    return [place for place, address in enumerate(addresses, 1) if apprise.Apprise.instantiate(address) is None]


class Sender:
    """A thread that sends messages one after the other. What goes wrong is said once, without an address.

    It begins with the import of apprise, which may take long on a file system of a cluster.
    """

    def __init__(self, addresses: Sequence[str], say: Say) -> None:
        self._addresses, self._say = addresses, say
        self._messages: queue.Queue[tuple[str, str] | None] = queue.Queue()
        self._told = self._sent_any = False
        self._thread = threading.Thread(target=self._work, name="notify", daemon=True)
        self._thread.start()

    def send(self, title: str, text: str) -> None:
        """Send a message. Returns at once."""
        self._sent_any = True
        self._messages.put((title, text))

    def close(self, seconds: float) -> None:
        """Wait for messages under way, but no longer than this."""
        self._messages.put(None)
        if not self._sent_any:
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._complain(f"a notification was not delivered within {seconds:g} s (notify.timeout)")

    def _work(self) -> None:
        try:
            import apprise  # only here: a run without addresses does not load it, and none waits for it
        except ModuleNotFoundError:
            self._complain("notifications need apprise: pip install 'gspo-hpc[notify]'")
            return
        logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)  # its lines show addresses
        services = [apprise.Apprise.instantiate(address) for address in self._addresses]
        if bad := services.count(None):
            self._complain(f"apprise does not know the service of {bad} of {len(services)} addresses in notify.urls")
        known = [service for service in services if service is not None]
        while (message := self._messages.get()) is not None:
            failed = sum(not self._sent(service, *message) for service in known)
            if failed:
                self._complain(f"a notification was not delivered to {failed} of {len(known)} services")

    def _sent(self, service: Any, title: str, text: str) -> bool:
        import apprise

        try:
            one = apprise.Apprise()
            one.add(service)
            return bool(one.notify(body=text, title=title))
        except Exception:  # plugins raise what they like
            return False

    def _complain(self, text: str) -> None:
        if not self._told:
            self._told = True
            self._say(text)
