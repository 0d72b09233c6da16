"""An engine in a weight update, as the owner sees it: all weights, or adapters beside weights that stay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gspo_hpc.engine import transfer
from gspo_hpc.engine.client import EngineDied
from gspo_hpc.engine.outputs import gist

if TYPE_CHECKING:
    from gspo_hpc.engine.client import Client
    from gspo_hpc.engine.settings import EngineAdapters
    from gspo_hpc.ops.weight_parts import Part


class WeightUpdate:
    """An engine that takes all of its weights (see transfer.EngineEndpoint)."""

    def __init__(self, client: Client, timeout: float, check: transfer.StreamCheck) -> None:
        """`timeout`: the longest wait for an answer, in seconds."""
        self._client, self._timeout, self._check = client, timeout, check
        self._loading = False  # a bucket, at the other end

    def begin(self) -> None:
        """See EngineEndpoint."""
        self._client.call(self._timeout, "llm", "start_weight_update")

    def check(self, part: Part) -> None:
        """See EngineEndpoint."""
        self._check.add(part)

    def post(self, bucket: dict[str, Any]) -> None:
        """See EngineEndpoint."""
        self._post("update_weights", {"update_info": bucket})

    def wait_loaded(self) -> None:
        """See EngineEndpoint."""
        if self._loading:
            self._loading = False
            try:
                self._take(self._client.answer(self._timeout))
            except EngineDied:
                raise
            except Exception as error:
                raise RuntimeError(f"vLLM refuses the weights: {gist(error)}") from error

    def finish(self) -> None:
        """See EngineEndpoint."""
        self._check.finish()
        self._client.call(self._timeout, "llm", "finish_weight_update")

    def kill(self) -> None:
        """See EngineEndpoint."""
        self._client.kill("a weight update failed")

    def _post(self, method: str, *arguments: Any) -> None:
        self._client.post(self._timeout, "llm", method, *arguments)
        self._loading = True

    def _take(self, answer: Any) -> None:
        """Take what the workers answered to a bucket."""


class AdapterUpdate(WeightUpdate):
    """An engine that takes a version of its adapters, and keeps its weights.

    Workers put each bucket's matrices aside, and with the last one the version takes the place of the one before.
    """

    def __init__(self, client: Client, timeout: float, settings: EngineAdapters, version: int) -> None:
        super().__init__(client, timeout, transfer.StreamCheck(settings.shapes, tied=False))
        self._settings, self._version = settings, version
        self._loaded: list[list[int]] = []  # versions that each worker has

    def begin(self) -> None:
        """See EngineEndpoint. Nothing is expected yet: layers stay as they are."""

    def post(self, bucket: dict[str, Any]) -> None:
        """See EngineEndpoint."""
        settings = self._settings
        bucket = bucket | {"version": self._version, "rank": settings.rank, "alpha": settings.alpha}
        self._post("collective_rpc", "load_adapters", None, (bucket,))

    def finish(self) -> None:
        """See EngineEndpoint."""
        self._check.finish()
        if any(loaded != [self._version] for loaded in self._loaded) or not self._loaded:
            raise RuntimeError(f"vLLM has adapters of versions {self._loaded}, and not of {self._version} alone")

    def _take(self, answer: Any) -> None:
        self._loaded = answer
