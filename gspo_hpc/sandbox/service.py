"""A sandbox behind HTTP, with the interface of SandboxFusion: a program is posted to /run_code."""

from __future__ import annotations

import json
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from gspo_hpc.sandbox.outcomes import Limit, Limits, Outcome, SandboxError, told_limit
from gspo_hpc.system.text import MALFORMED, parse_json

_PATIENCE = 30.0  # seconds beyond the program's own for the service's queue, which is not the program's time
_MOST_REPLY = 1 << 26  # bytes
_CHUNK = 1 << 16
_ENDS = ("Finished", "TimeLimitExceeded")  # of a program that was run; "Error" is the service's own
_EXCERPT = 200  # characters of a reply that an error quotes


def run(url: str, program: str, stdin: str, limits: Limits) -> Outcome:
    """Run a program on the service; return what it did. Raises SandboxError where the service did not run it.

    Of the limits, the service is told seconds and memory; the others are its own.
    """
    asked = {
        "code": program,
        "language": "python",
        "stdin": stdin,
        "run_timeout": limits.seconds,
        "memory_limit_MB": max(1, limits.memory_bytes >> 20),
    }
    place = f"{url.rstrip('/')}/run_code"
    data = _within(limits.seconds + _PATIENCE, place, lambda deadline: _posted(place, asked, deadline))
    try:
        return _outcome(parse_json(data), limits)
    except MALFORMED:
        raise SandboxError(f"{place} gave no result of a program: {data[:_EXCERPT]!r}") from None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the answer of another host is not the service's, and a POST would become a GET."""

    def redirect_request(self, *_: Any) -> None:
        """Have the redirect raised as an error."""


def _within(seconds: float, place: str, call: Callable[[float], bytes]) -> bytes:
    """Return what a call returns, which gets its deadline on the monotonic clock. Raises SandboxError, also after it.

    A time limit of a socket holds for each of its operations: a service that sends a byte now and then never meets it.
    """
    answers: queue.SimpleQueue[bytes | SandboxError] = queue.SimpleQueue()
    deadline = time.monotonic() + seconds

    def work() -> None:
        try:
            answers.put(call(deadline))
        except SandboxError as error:
            answers.put(error)
        except Exception as error:  # whatever a client of HTTP raises on what is no HTTP, or a URL that is none
            why = str(getattr(error, "reason", error))[:_EXCERPT]
            answers.put(SandboxError(f"{place} cannot be reached: {why or type(error).__name__}"))

    threading.Thread(target=work, name="sandbox-service", daemon=True).start()
    try:
        answer = answers.get(timeout=seconds)
    except queue.Empty:
        raise SandboxError(f"{place} gave no answer within {seconds:g} s") from None
    if isinstance(answer, SandboxError):
        raise answer
    return answer


def _posted(place: str, asked: dict[str, Any], deadline: float) -> bytes:
    """Return the body of the answer to a request. Raises SandboxError, or an error of the client."""
    if not place.startswith(("http://", "https://")):  # the client would read files, too
        raise SandboxError(f"sandbox.url must begin with http:// or https://; it makes {place}")
    request = urllib.request.Request(place, json.dumps(asked).encode(), {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(_NoRedirect)
    data = b""
    try:
        with opener.open(request, timeout=max(0.001, deadline - time.monotonic())) as reply:
            length = reply.length  # as its header has it; None where the end of the connection is that of the reply
            while more := reply.read1(_CHUNK):
                data += more
                if len(data) > _MOST_REPLY:
                    raise SandboxError(f"{place} answered with more than {_MOST_REPLY >> 20} MiB")
                if time.monotonic() > deadline:  # nobody waits any more
                    break
    except urllib.error.HTTPError as error:
        with error:
            raise SandboxError(f"{place} refused with {error.code}: {error.reason}") from None
    if length is not None and len(data) < length:  # `read1` takes an end of the connection for that of the reply
        raise SandboxError(f"{place} gave no result of a program, but {len(data):,} of {length:,} bytes of one")
    return data


def _outcome(answer: dict[str, Any], limits: Limits) -> Outcome:
    """Return the outcome in an answer of the service. Raises SandboxError, or another error for another text."""
    found = answer["run_result"] or answer.get("compile_result")
    if answer["status"] not in ("Success", "Failed") or found is None or found["status"] not in _ENDS:
        raise SandboxError(f"the service did not run the program: {str(answer.get('message'))[:_EXCERPT]}")
    most = limits.output_bytes
    out, error = (_text(found[name]) for name in ("stdout", "stderr"))
    seconds = float(found["execution_time"] or 0.0)
    limit: Limit | None = None
    if found["status"] == "TimeLimitExceeded":
        limit = "seconds"
    elif max(len(out.encode("utf-8", "replace")), len(error.encode("utf-8", "replace"))) > most:
        limit = "output_kb"
    if limit is not None:
        return Outcome(out[:most], error[:most], None, limit, seconds)
    status = found["return_code"]
    if type(status) is not int:  # and no bool, whose False would be an exit status of 0
        raise TypeError(f"return_code is {status!r}")
    if status == 0 and answer["status"] != "Success":
        raise SandboxError(
            f"the service calls a program failed that ended with 0: {str(answer.get('message'))[:_EXCERPT]}"
        )
    return Outcome(out, error, status, told_limit(status, error), seconds)


def _text(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value or ""
