"""The rank that failed first, from whatever is known of each."""

from __future__ import annotations

import pytest

from gspo_hpc.launch.failures import Failure, first_failure

GONE = "RuntimeError: [gloo] Connection closed by peer"


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([Failure(0, "KeyError: a", at=2.0), Failure(1, "KeyError: b", at=1.0)], 1),  # the earlier one
        ([Failure(0, GONE, at=1.0), Failure(1, "KeyError: b", at=2.0)], 1),  # not one that only lost another rank
        ([Failure(0, GONE, at=2.0), Failure(1, GONE, at=1.0)], 1),
        ([Failure(0, GONE, killed=True, at=1.0), Failure(1, "KeyError: b", at=2.0)], 0),  # killed while it reported
        ([Failure(0, "KeyError: a"), Failure(1, killed=True)], 1),  # without times: killed, then an error, then neither
        ([Failure(0, killed=True, at=2.0), Failure(1, "RuntimeError: cannot restore /datastore/a", at=1.0)], 1),
        ([Failure(0, "DistStoreError: wait timed out", at=1.0), Failure(1, "KeyError: b", at=2.0)], 1),
        (
            [
                Failure(0, "RuntimeError: it has closed its store", at=1.0),
                Failure(1, "KeyError: b", at=2.0),
            ],
            1,
        ),
        # Words of networks in a first error that is none of torch.distributed's.
        ([Failure(0, killed=True, at=2.0), Failure(1, "httpx.ConnectTimeout: timed out", at=1.0)], 1),
        ([Failure(0, killed=True, at=2.0), Failure(1, "OSError: [Errno 110] Connection timed out: '/a'", at=1.0)], 1),
        ([Failure(0, killed=True, at=2.0), Failure(1, "ValueError: optimizer.distributed needs DP", at=1.0)], 1),
        ([Failure(0, "torch.distributed.DistNetworkError: no answer", at=1.0), Failure(1, "KeyError: b", at=2.0)], 1),
        ([Failure(0, "RuntimeError: Timed out waiting 1800000ms for recv", at=1.0), Failure(1, "KeyError", at=2.0)], 1),
        ([Failure(0), Failure(1, "KeyError: b")], 1),
        ([Failure(0, GONE), Failure(1)], 1),
        ([Failure(1, "KeyError: b"), Failure(0, "KeyError: a")], 0),
    ],
)
def test_the_first_failure(failures: list[Failure], rank: int) -> None:
    assert first_failure(failures).rank == rank
    assert first_failure(reversed(failures)).rank == rank
