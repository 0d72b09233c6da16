"""A tool that runs what the model wrote as a program of Python, in the sandbox."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gspo_hpc.sandbox.outcomes import Outcome
    from gspo_hpc.sandbox.runner import Sandbox


def python(code: str, sandbox: Sandbox) -> str:
    """Run a program of Python and return what it prints. Nothing is kept from one call for another.

    Args:
        code: The program, which prints its results.
        sandbox: Where it runs.
    """
    outcome = sandbox.run(code)
    if outcome.ended_well:
        return outcome.stdout
    raise RuntimeError(_told(outcome))


def _told(outcome: Outcome) -> str:
    """Return the last lines of what a program said that did not end well, and why it ended."""
    if outcome.limit is not None and not outcome.out_of_memory:
        return f"the program was ended: it is beyond its limit of {outcome.limit}"
    said = outcome.stderr.strip().rpartition("\n")[2]
    return said or f"the program ended with exit status {outcome.status}"
