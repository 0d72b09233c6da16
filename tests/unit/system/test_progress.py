"""Why a main thread may stand still, and for how long. Takes a moment.

Catches a library that hangs for ever in a block that is said to end.
"""

from __future__ import annotations

import time

from gspo_hpc.system import progress


def test_an_excuse_ends_after_the_seconds_that_it_is_given() -> None:
    with progress.limited(0.05):
        assert progress.marks()[2] == progress.LIMITED
        with progress.waiting():
            time.sleep(0.06)
            assert progress.marks()[2] == progress.WAITS
        assert progress.marks()[2] is None
        with progress.limited():
            assert progress.marks()[2] == progress.LIMITED
        assert progress.marks()[2] is None
    assert progress.marks()[2] is None
    with progress.limited():
        assert progress.marks()[2] == progress.LIMITED
