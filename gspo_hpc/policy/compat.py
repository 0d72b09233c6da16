"""Everything that this room uses of Megatron-Core and torch.distributed beyond their public interfaces.

No other file of this room names one of their attributes with a leading underscore or replaces one of their functions,
but for :mod:`gspo_hpc.policy.megatron_on_cpu`, whose whole job that is. Each function here says what it relies on, why,
since which version, and what to check on an upgrade; ``tests/torch/policy/test_compat.py`` lists the versions that
these names were checked against and finds each of them in the sources of the installed one.

Shapes: T tokens, H hidden size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter


class HiddenStates:
    """A mixin that makes a GPTModel return its hidden states [T, 1, H] in place of logits or a loss.

    Relies on ``GPTModel._postprocess(hidden_states, ...)`` being the last step of ``forward`` (megatron-core 0.16 to
    0.19); with ``post_process=False`` the model would also leave out the final norm and the output layer's weight. It
    stands before GPTModel in the list of base classes. On an upgrade check that ``forward`` still returns its result.
    """

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states


def set_rotary(model: Any, rotary: torch.nn.Module) -> None:
    """Replace the rotary embedding of a GPTModel by `rotary`.

    Relies on the attribute ``GPTModel.rotary_pos_emb``, of which ``forward`` calls ``get_rotary_seq_len(...)`` and then
    the module itself (0.16 to 0.19): Megatron's own has no way to take positions other than 0..T-1. On an upgrade check
    what ``GPTModel._preprocess`` calls it with.
    """
    model.rotary_pos_emb = rotary


class ReplayableRouter(TopKRouter):
    """Megatron's router, with a replay of the caller's making and without the update of an expert bias.

    Relies on ``TopKRouter.router_replay``, whose ``get_replay_topk`` Megatron calls to choose experts, scores first
    (0.16 to 0.19): the setting ``moe_enable_routing_replay`` would make Megatron's own, which replays whole layers and
    knows no token without a choice. On an upgrade check ``moe_utils.topk_routing_with_score_function``.
    """

    def replay(self, with_: Any) -> None:
        """Choose experts by `with_`, an object with Megatron's method ``get_replay_topk``."""
        self.router_replay = with_

    def _apply_expert_bias(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: no family here has such a bias.

        Megatron's method (0.16 to 0.19) does nothing without a bias either, but it is compiled first.
        """


def allow_routers_without_transformer_engine() -> None:
    """Define a name that Megatron's router reads, where Transformer Engine is not installed.

    ``moe_utils`` asks whether ``te_general_gemm`` is None, and 0.16.1 leaves the name undefined where its import of
    Transformer Engine fails. Later versions define it. Delete this with the support of 0.16.
    """
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def moe_submodules(spec: Any) -> Any:
    """Return the submodules of a specification that ``get_moe_module_spec`` made.

    0.16 returns a ModuleSpec. 0.19 returns a builder, a partial application of the layer's class, which has them as the
    keyword argument ``submodules``. Both are read here, since the router has to be replaced in either.
    """
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


def process_groups() -> list[Any]:
    """Return all process groups of this process, the default one included.

    Relies on ``torch.distributed.distributed_c10d._world.pg_map`` (read in torch 2.13). Megatron only forgets its
    groups when it destroys a layout: their threads would go on, and it has no list of those that it made more than
    once.
    """
    return list(dist.distributed_c10d._world.pg_map)


def default_store() -> dist.Store:
    """Return the key-value store of the default process group.

    Relies on ``torch.distributed.distributed_c10d._get_default_store()`` (read in torch 2.13); no public function gives
    the store of a group that was made from MASTER_ADDR and MASTER_PORT.
    """
    return dist.distributed_c10d._get_default_store()
