"""Share a prompt's whole computation within its group, also the tokens that do not fill a cache block.

vLLM's prefix cache shares full blocks only, of 32 tokens on the CPU, so every completion of a group computes the rest
of the prompt again: up to 32 tokens, more than a short answer has. This module is a KV connector, vLLM's interface for
taking keys and values from elsewhere; here they come from the engine itself. The first request with a prompt computes
it. The others wait for that, get a copy of the block in which the prompt ends, and compute the prompt's last token
only. They overwrite whatever the copy holds behind the prompt's end.

vLLM loads :class:`GroupPrompts` by the path of this module (`kv_connector_module_path` in ``engine/settings.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

from gspo_hpc.engine import compat


@dataclass
class Copies(KVConnectorMetadata):
    """Cache blocks to copy before the next forward pass, as pairs (from, to)."""

    pairs: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class _Leader:
    """The running request that computed a prompt first, and the numbers of its blocks."""

    request: Any
    blocks: list[int]


class GroupPrompts(KVConnectorBase_V1):  # type: ignore[misc]
    """Both sides of the connector: the scheduler's chooses the blocks, the worker's copies them."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self._block_size = int(vllm_config.cache_config.block_size)
        self._leaders: dict[tuple[int, ...], _Leader] = {}  # by prompt
        self._prompts: dict[str, tuple[int, ...]] = {}  # of leaders, by request
        self._pairs: list[tuple[int, int]] = []
        self._cache_config = vllm_config.cache_config
        self._caches: list[tuple[torch.Tensor, int]] = []  # each layer's cache and its dimension of blocks

    # ---- in the scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many prompt tokens can be copied, and False; None for the number while they are being computed."""
        missing = request.num_prompt_tokens - 1 - num_computed_tokens  # the last token is always computed
        leader = self._leaders.get(tuple(request.prompt_token_ids or ()))
        if leader is None or leader.request is request or request.num_output_tokens or not 0 < missing:
            return 0, False
        if not compat.is_running(leader.request):
            return 0, False
        if leader.request.num_computed_tokens < request.num_prompt_tokens:
            return None, False
        whole = missing < self._block_size and self._last_block(request) < len(leader.blocks)
        return (missing if whole else 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note which block is copied for `request`; the first request that is scheduled with a prompt leads.

        A leader that was preempted is not running when it is scheduled again, so it leads with its new blocks.
        """
        groups = blocks.get_block_ids()
        if len(groups) != 1:  # a model whose layers have different kinds of cache
            return
        prompt = tuple(request.prompt_token_ids or ())
        leader = self._leaders.get(prompt)
        if leader is None or not compat.is_running(leader.request):
            self._leaders[prompt] = _Leader(request, list(groups[0]))
            self._prompts[request.request_id] = prompt
        elif num_external_tokens:
            last = self._last_block(request)
            self._pairs.append((leader.blocks[last], groups[0][last]))

    def build_connector_meta(self, scheduler_output: Any) -> Copies:
        """Return the blocks that the worker copies before this step."""
        copies, self._pairs = Copies(self._pairs), []
        return copies

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget `request` as a leader, because its blocks are about to be freed. Return False: free them now."""
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is not None and (leader := self._leaders.get(prompt)) is not None and leader.request is request:
            del self._leaders[prompt]
        return False, None

    def _last_block(self, request: Any) -> int:
        """Return the index of the block in which the prompt ends."""
        return int(request.num_prompt_tokens - 1) // self._block_size

    # ---- in the worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Note the caches of all layers, [blocks, ...] each, or [2, blocks, ...] in earlier versions of vLLM.

        Raises ValueError for a cache without a dimension of blocks.
        """
        blocks = self._cache_config.num_gpu_blocks
        for name, cache in kv_caches.items():
            found = [dimension for dimension, size in enumerate(cache.shape[:2]) if size == blocks]
            if not found:
                raise ValueError(f"the cache of {name} has no dimension of {blocks} blocks: {tuple(cache.shape)}")
            self._caches.append((cache, found[-1]))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Copy the blocks before the forward pass."""
        metadata = compat.connector_metadata(self)
        assert isinstance(metadata, Copies)
        if metadata.pairs:
            source, target = (torch.tensor(side) for side in zip(*metadata.pairs, strict=True))
            for cache, dimension in self._caches:
                cache.index_copy_(dimension, target, cache.index_select(dimension, source))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: no copy is under way once the forward pass begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: everything is in the engine's own cache already."""

    def wait_for_save(self) -> None:
        """Do nothing, like :meth:`save_kv_layer`."""
