"""The parts that one rank trains with."""

from __future__ import annotations

from dataclasses import dataclass

from gspo_hpc.policy.policy import Policy
from gspo_hpc.training.agreement.watch import RolloutGapMonitor
from gspo_hpc.training.checkpoints import Checkpoints
from gspo_hpc.training.observers.base import StepObserver
from gspo_hpc.training.phases import Evaluator, LogprobPasses
from gspo_hpc.training.recipe import Recipe
from gspo_hpc.training.sampling.base import Sampler
from gspo_hpc.training.serving.weights import RemoteWeights
from gspo_hpc.training.step_record import StepRecorder
from gspo_hpc.training.sync import EngineWeights
from gspo_hpc.training.telemetry.step_clock import StepClock


@dataclass(frozen=True)
class Session:
    """The parts that one rank trains with. All ranks call each method of them together."""

    recipe: Recipe  # fixed
    policy: Policy
    sampler: Sampler  # generate, reward, advantage
    logprobs: LogprobPasses
    evaluator: Evaluator
    weights: EngineWeights | RemoteWeights
    watch: RolloutGapMonitor  # of the gaps that updates measure
    checkpoints: Checkpoints
    recorder: StepRecorder
    observers: StepObserver
    clock: StepClock
