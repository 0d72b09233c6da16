"""The methods that vLLM's worker gets in addition; vLLM makes their class a base class of it."""

from __future__ import annotations

from typing import Any

from gspo_hpc.engine.constants import held
from gspo_hpc.engine.experts import sums
from gspo_hpc.ops.expert_sums import Held

EXTENSION = "gspo_hpc.engine.worker.WorkerMethods"  # as vLLM's `worker_extension_cls` takes it


class WorkerMethods:
    """Methods for ``LLM.collective_rpc``, which calls them by name."""

    weight_transfer_engine: Any

    def load_adapters(self, bucket: dict[str, Any]) -> list[int]:
        """Take a bucket of matrices; return the versions that this worker has then."""
        loaded: list[int] = self.weight_transfer_engine.receive_adapters(bucket)
        return loaded

    def expert_sums(self) -> list[Held]:
        """Return the sums of the experts' weights that this worker has; see gspo_hpc.ops.expert_sums."""
        return sums.held(self.weight_transfer_engine.model)

    def constants(self) -> dict[str, Any]:
        """Return the numbers beside its weights by which this worker's model computes; see gspo_hpc.ops.constants."""
        return held.of(self.weight_transfer_engine.model)
