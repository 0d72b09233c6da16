"""A text stream that never costs a run anything."""

from __future__ import annotations

from typing import TextIO


class LenientStream:
    """A text stream that drops what its terminal, gone or unable to encode it, does not take."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write what the encoding has; the rest becomes `?`."""
        try:
            self.stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
        except (OSError, ValueError):
            pass  # the terminal was closed; metrics.jsonl has every number
        return len(text)

    def flush(self) -> None:
        """Flush if there is still something to flush to."""
        try:
            self.stream.flush()
        except (OSError, ValueError):
            pass

    def fileno(self) -> int:
        """Return the stream's descriptor, for its size. Raises OSError if it has none."""
        return self.stream.fileno()

    def isatty(self) -> bool:
        """Return True: rich asks only for a stream that was found to be a terminal, or declared one."""
        return True
