"""Tell how verl and ms-swift estimate the divergence from the reference otherwise."""

from __future__ import annotations

from gspo_hpc.importers.draft import Draft


def bounded(draft: Draft, estimator: str, since: str = "") -> None:
    """Tell that k3, called `estimator` there, has a bound; `since`: in which versions."""
    draft.differs.append(
        f"{estimator}: a token's estimate of the divergence is 10 at most there{since}, and has no bound here"
    )
