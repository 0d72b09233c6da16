"""The engines of reward models that a rank starts beside its engine of the policy."""

from __future__ import annotations

from gspo_hpc.config import derived
from gspo_hpc.config.schema import Config, RewardModel
from gspo_hpc.config.sections import reward_models
from gspo_hpc.engine.engine import Engine, EngineSettings
from gspo_hpc.engine.scoring.classifier import Classifier
from gspo_hpc.engine.scoring.reading import Reader
from gspo_hpc.engine.settings import threads_of
from gspo_hpc.models import architecture
from gspo_hpc.rollout.scoring import ScoringEngine


def start(config: Config, per_node: int) -> dict[str, ScoringEngine]:
    """Return the engines of the models that terms of the reward ask, by name; a node has `per_node` of each.

    They are started one after the other. Those that share GPUs sleep before the next one takes them.
    """
    models = {model.name: model for model in config.reward.scored.values()}
    made = {name: _engine(config, model, per_node) for name, model in models.items()}
    for name, one in made.items():
        one.engine.start()
        if not reward_models.is_apart(config, models[name]):
            one.engine.sleep(1)
    return made


def _engine(config: Config, model: RewardModel, per_node: int) -> ScoringEngine:
    kind = Classifier if model.kind == "classification" else Engine
    return ScoringEngine(kind(settings(config, model, per_node)), Reader.of(model, reward_models.length(config, model)))


def settings(config: Config, model: RewardModel, per_node: int) -> EngineSettings:
    """Return the settings of one of `per_node` engines of a reward model on a node."""
    content = architecture.planned(model.path)[0] or {}
    share = {} if config.cluster.platform == "cpu" else {"gpu_memory_utilization": model.gpu_memory_utilization}
    return EngineSettings(
        model_path=model.path,
        dtype=derived.engine_dtype(reward_models.in_place_of_policy(config, model)),
        tensor_parallel_size=model.tensor_parallel_size,
        first_gpu=reward_models.first_gpu(config, model),
        max_model_len=reward_models.length(config, model),
        platform=config.cluster.platform,
        kv_cache_gb=model.kv_cache_gb,
        threads=threads_of(content, per_node * model.tensor_parallel_size),
        seed=config.run.seed % 2**32,
        timeout=config.faults.engine_timeout,
        classifies=model.kind == "classification",
        batch_invariant=derived.deterministic_kernels(config),
        engine_args=share | model.engine,
    )
