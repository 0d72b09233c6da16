"""A sandbox behind HTTP, with the interface of SandboxFusion: a program is posted to /run_code."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from gspo_hpc.sandbox.outcomes import Limit, Limits, Outcome, SandboxError, told_limit

_PATIENCE = 30.0  # seconds beyond the program's own for the service's queue, which is not the program's time
_MOST_REPLY = 1 << 26  # bytes
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
    request = urllib.request.Request(place, json.dumps(asked).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=limits.seconds + _PATIENCE) as reply:
            data = reply.read(_MOST_REPLY)
    except urllib.error.HTTPError as error:
        raise SandboxError(f"{place} refused with {error.code}: {error.reason}") from None
    except OSError as error:  # no connection, or none in time
        raise SandboxError(f"{place} cannot be reached: {getattr(error, 'reason', error)}") from None
    try:
        return _outcome(json.loads(data), limits)
    except (KeyError, TypeError, ValueError):
        raise SandboxError(f"{place} gave no result of a program: {data[:_EXCERPT]!r}") from None


def _outcome(answer: dict[str, Any], limits: Limits) -> Outcome:
    """Return the outcome in an answer of the service. Raises SandboxError, or another error for another text."""
    found = answer["run_result"] or answer.get("compile_result")
    if answer["status"] == "SandboxError" or found is None:
        raise SandboxError(f"the service did not run the program: {str(answer.get('message'))[:_EXCERPT]}")
    most = limits.output_bytes
    out, error = (str(found[name] or "") for name in ("stdout", "stderr"))
    seconds = float(found["execution_time"] or 0.0)
    limit: Limit | None = None
    if found["status"] == "TimeLimitExceeded":
        limit = "seconds"
    elif max(len(out.encode()), len(error.encode())) > most:
        limit = "output_kb"
    if limit is not None:
        return Outcome(out[:most], error[:most], None, limit, seconds)
    status = int(found["return_code"])
    return Outcome(out, error, status, told_limit(status, error), seconds)
