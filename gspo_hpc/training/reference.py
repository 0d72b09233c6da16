"""The reference model of the KL term: the policy's own modules with other weights swapped in, or a teacher.

They are the weights of the start, or with algorithm.reference_interval those of a later step or a moving average. Where
adapters are trained, all other weights are the same anyway, and the model of the start is the one without adapters.
With algorithm.teacher the reference is another model, which has modules of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from gspo_hpc.config.derived import (
    has_own_layout,
    offloaded_parts,
    passes_needed,
    reference_is_base,
    teacher_config,
)
from gspo_hpc.config.schema import Config
from gspo_hpc.data.records import Floats
from gspo_hpc.data.table import ShardedGroups
from gspo_hpc.ops.host_memory import HostMemory
from gspo_hpc.policy.passes import PassMonitor
from gspo_hpc.policy.policy import Policy
from gspo_hpc.policy.process_groups import Ranks, SecondLayout
from gspo_hpc.training.bringup import read_architecture
from gspo_hpc.training.update import logprob_pass, with_values


class Reference:
    """The model as it was at the start, or as refreshes left it, kept in host memory and swapped in for its pass."""

    def __init__(self, policy: Policy) -> None:
        self._memory = HostMemory()
        # One for each parameter that is trained; none where the start is the model without its adapters.
        self.weights = [] if reference_is_base(policy.config) else self._copies(policy.trained_parameters())
        self._current: list[torch.Tensor] | None = None  # where the policy's own weights wait meanwhile

    def with_logprobs(
        self, policy: Policy, groups: ShardedGroups, config: Config, *, monitor: PassMonitor | None = None
    ) -> ShardedGroups:
        """Return the groups with the log-probs of all completions under the reference's weights. Collective.

        Tokens go to the experts that the reference chooses.
        """
        policy.settle()
        if reference_is_base(policy.config):
            with policy.without_adapters():
                passed = logprob_pass(policy, groups, "reference", config, replay=False, monitor=monitor)
            return _with(groups, passed.logprobs)
        policy.before_change()
        parameters = list(policy.trained_parameters())
        with torch.no_grad():
            if self._current is None:
                self._current = self._copies(parameters)
            else:
                _copy(parameters, self._current)
            try:
                _copy(self.weights, parameters)
                passed = logprob_pass(policy, groups, "reference", config, replay=False, monitor=monitor)
            finally:
                _copy(self._current, parameters)
        return _with(groups, passed.logprobs)

    def refresh(self, policy: Policy, share: float) -> None:
        """Move the weights towards the policy's: `share` of these and the rest of what they were, above 0, at most 1.

        The mean is taken in fp32 and rounded to the weights' dtype. With 1 the weights become the policy's.
        """
        policy.settle()
        policy.before_change()  # a save under way may be copying the weights
        with torch.no_grad():
            if share == 1:
                _copy([p.detach() for p in policy.trained_parameters()], self.weights)
                return
            for parameter, weight in zip(policy.trained_parameters(), self.weights, strict=True):
                weight.copy_(weight.float().lerp_(parameter.detach().to(weight.device, torch.float32), share))

    def _copies(self, parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
        """Return copies of parameters in host memory."""
        values = [p.detach() for p in parameters]
        copies = [self._memory.empty(one.shape, one.dtype, locked=one.is_cuda) for one in values]
        _copy(values, copies)
        return copies


class Teacher:
    """Another model in the place of the reference, with the trainer's layout or its own. Its weights never change.

    It is not in checkpoints. On GPUs it waits in host memory between its passes, and while it computes, the trainer
    waits there, as far as it does while engines generate.
    """

    def __init__(self, config: Config, ranks: Ranks) -> None:
        """Load the model. Collective."""
        own = teacher_config(config)
        self._layout = SecondLayout(own, ranks) if has_own_layout(config) else None
        with self._in_its_layout():
            self._model = Policy(
                read_architecture(own), own, self._layout.ranks if self._layout else ranks, trains=False
            )
            self._model.load(str(own.model.path))
            self.fingerprint = self._model.fingerprint()
        self._leave()

    def with_logprobs(
        self, policy: Policy, groups: ShardedGroups, config: Config, *, monitor: PassMonitor | None = None
    ) -> ShardedGroups:
        """Return the groups with the log-probs of all completions under the teacher. Collective."""
        if (parts := offloaded_parts(config)) or config.memory.offload_optimizer:
            policy.offload(parts)  # where it is already, after a rollout on the same GPUs
        self._model.restore()
        try:
            with self._in_its_layout():
                passed = logprob_pass(self._model, groups, "reference", config, replay=False, monitor=monitor)
        finally:
            self._leave()
        return _with(groups, passed.logprobs)

    def _in_its_layout(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._layout is None else self._layout.current()

    def _leave(self) -> None:
        if self._model.ranks.device.type == "cuda":
            self._model.offload({"weights"})


AnyReference = Reference | Teacher


def load_teacher(config: Config, ranks: Ranks) -> Teacher | None:
    """Return the teacher, if there is one. Collective."""
    return Teacher(config, ranks) if config.algorithm.has_teacher else None


def reference_of(policy: Policy, teacher: Teacher | None) -> AnyReference | None:
    """Return what the KL term is against: the teacher, or the policy as it is now; None without a KL term."""
    if not passes_needed(policy.config).reference:
        return None
    return teacher or Reference(policy)


def refuse_other_teacher(stored: str | None, present: str | None, path: str | None) -> None:
    """Raise ValueError unless the teacher that a run has learned from, by its fingerprint, is the one that is here."""
    if stored != present:
        raise ValueError(
            f"algorithm.teacher {path} has other weights than those that this run has learned from (fingerprint "
            f"{stored} in the checkpoint, {present} here): give back the teacher that the run began with"
        )


def _with(groups: ShardedGroups, logprobs: Mapping[tuple[int, int], Floats]) -> ShardedGroups:
    return with_values(groups, logprobs, lambda c, v: replace(c, reference_logprobs=v))


def moving(reference: AnyReference | None, config: Config) -> Sequence[torch.Tensor] | None:
    """Return the weights of a reference that does not stay that of the start, which checkpoints have to hold."""
    return reference.weights if isinstance(reference, Reference) and config.algorithm.moves_reference else None


def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copy tensors between host and GPU, and return when all have arrived."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)
    if any(one.is_cuda for one in (*sources, *targets)):
        torch.cuda.current_stream().synchronize()
