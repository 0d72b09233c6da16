"""Numbers and comparisons of the converters that a planted mistake changed without a test that saw it (seconds)."""

from __future__ import annotations

import pytest

from gspo_hpc.config.schema import Optimizer
from gspo_hpc.importers.convert import convert

TRL = "trl grpo --num_generations 8 --per_device_train_batch_size 8 --max_steps 100"


def trl_optimizer(words: str) -> Optimizer:
    return convert(f"{TRL} {words}", gpus=1).config.optimizer


@pytest.mark.parametrize(("given", "steps"), [("1", 1), ("10.7", 10), ("0.125", 13), ("0", 0)])
def test_warm_up_of_trl_is_steps_from_1_and_a_share_below(given: str, steps: int) -> None:
    """Steps are rounded down, and a share up, as transformers does."""
    assert trl_optimizer(f"--warmup_steps {given}").lr_warmup_steps == steps


@pytest.mark.parametrize(("given", "interval"), [("1", 1), ("2", 2), ("0.5", 50)])
def test_checkpoints_of_trl_after_each_step(given: str, interval: int) -> None:
    """A share of the run, below 1, is not carried over: the interval is ours."""
    assert convert(f"{TRL} --save_steps {given}", gpus=1).config.checkpoint.interval == interval


@pytest.mark.parametrize(("bound", "kind"), [("1", "truncated"), ("1.5", "truncated"), ("0.9", "none")])
def test_weights_of_at_most_1_are_a_correction(bound: str, kind: str) -> None:
    mode = "--use_vllm --vllm_importance_sampling_mode token_truncate --vllm_importance_sampling_clip_max"
    algorithm = convert(f"{TRL} {mode} {bound}", gpus=1).config.algorithm
    assert algorithm.correction == kind and (kind == "none" or algorithm.correction_high == float(bound))


@pytest.mark.parametrize(("cycles", "carried"), [("0.5", True), ("1", False), ("1.5", False)])
def test_half_a_wave_is_the_cosine_that_is_here(cycles: str, carried: bool) -> None:
    words = f"--lr_scheduler_type cosine --lr_scheduler_kwargs '{{\"num_cycles\": {cycles}}}'"
    found = convert(f"{TRL} {words}", gpus=1)
    assert ("lr_scheduler_kwargs" in {item.name for item in found.carried}) is carried
    assert (
        any("num_cycles of lr_scheduler_type cosine: no counterpart" in item.why for item in found.left) is not carried
    )


@pytest.mark.parametrize(
    ("model", "told"),
    [("ZhipuAI/GLM-4.5-Air", True), ("GLM-4.7", True), ("GLM-4-9B", False), ("GLM-4.1V", False), ("Qwen3-8B", True),
     ("deepseek-ai/DeepSeek-V3.1", True), ("Qwen2.5-7B", False), ("Qwen3-8B-FP8", True), ("Qwen3-8B-Base/", True),
     ("Qwen3-30B-A3B-FP8", True), ("Qwen3-4B-Instruct-2507", False)],
)  # fmt: skip
def test_models_that_ms_swift_does_not_let_think(model: str, told: bool) -> None:
    found = convert(f"swift rlhf --rlhf_type grpo --num_generations 4 --beta 0 --model {model}", gpus=4)
    assert any("does not let" in line for line in found.assumed) is told


def test_what_decides_the_dispatcher_of_tokens_is_carried_over() -> None:
    run = "megatron rlhf --rlhf_type grpo --num_generations 4 --train_iters 5 --moe_enable_deepep true"
    found = convert(run, gpus=4)
    assert found.config.moe.token_dispatcher == "flex"
    assert {item.name: item.keys for item in found.carried}["moe_enable_deepep"] == ("moe.token_dispatcher",)


@pytest.mark.parametrize(("given", "norm"), [("null", 0.0), ("0.0", 0.0), ("0.3", 0.3)])
def test_no_gradient_norm_is_no_clipping(given: str, norm: float) -> None:
    text = f"# GRPO trainer config\nnum_generations: 8\nmax_steps: 10\nmax_grad_norm: {given}\n"
    assert convert(text, gpus=1).config.optimizer.clip_grad == norm


VERL = (
    "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.rollout.n=8"
)
SWIFT = "NPROC_PER_NODE=4 swift rlhf --rlhf_type grpo --num_generations 4 --max_steps 9"


def test_verl_evaluates_before_the_first_step_unless_it_is_told_otherwise() -> None:
    assert convert(VERL).config.eval.before
    assert not convert(f"{VERL} trainer.val_before_train=False").config.eval.before


@pytest.mark.parametrize("run", [f"{TRL} --beta 0.1", f"{SWIFT} --tuner_type full --beta 0.1"])
def test_a_reference_that_follows_has_their_interval_and_share(run: str) -> None:
    algorithm = convert(f"{run} --sync_ref_model true", gpus=4).config.algorithm
    assert (algorithm.reference_interval, algorithm.reference_mixup) == (512, 0.6)
    given = f"{run} --sync_ref_model true --ref_model_sync_steps 64 --ref_model_mixup_alpha 0.9"
    algorithm = convert(given, gpus=4).config.algorithm
    assert (algorithm.reference_interval, algorithm.reference_mixup) == (64, 0.9)


@pytest.mark.parametrize(("engines", "each", "told"), [(1, 1, True), (2, 1, False), (3, 1, True), (4, 2, False)])
def test_engines_that_no_two_nodes_share_evenly_are_told(engines: int, each: int, told: bool) -> None:
    serve = f"trl vllm-serve --model m --data_parallel_size {engines} &\n"
    train = "accelerate launch --num_processes 4 --num_machines 2 grpo.py --num_generations 8 "
    found = convert(f"{serve}{train} --per_device_train_batch_size 8 --use_vllm --vllm_mode server\n")
    assert found.config.cluster.nodes == 2 and found.config.rollout.engines_per_node == each
    assert any(f"{engines} in the original" in line for line in found.differs) is told


@pytest.mark.parametrize(("tuner", "rate"), [("", 1e-4), ("--tuner_type lora", 1e-4), ("--tuner_type full", 1e-5)])
def test_the_rate_of_ms_swift_is_ten_times_as_high_for_adapters(tuner: str, rate: float) -> None:
    assert convert(f"{SWIFT} {tuner}").config.optimizer.lr == rate


def test_weights_of_the_losses_where_none_is_given() -> None:
    actor = "actor_rollout_ref.actor"
    assert convert(f"{VERL} {actor}.use_kl_loss=True").config.algorithm.kl_beta == 0.001
    assert convert(f"{VERL} {actor}.use_kl_loss=True {actor}.kl_loss_coef=0.01").config.algorithm.kl_beta == 0.01
    adaptive = f"{TRL} --entropy_coef 0.01 --use_adaptive_entropy true"
    assert convert(adaptive, gpus=1).config.algorithm.entropy_target == 0.2
    assert convert(f"{adaptive} --entropy_target 0.5", gpus=1).config.algorithm.entropy_target == 0.5


@pytest.mark.parametrize(("rollout", "refused"), [(1, True), (2, True), (4, False), (8, False)])
@pytest.mark.parametrize("run", ["TRL", "ms-swift"])
def test_a_rollout_without_whole_groups_is_refused_as_there(run: str, rollout: int, refused: bool) -> None:
    sizes = "--per_device_train_batch_size 1 --gradient_accumulation_steps 8 --num_generations 4"
    start = "trl grpo --model_name_or_path m" if run == "TRL" else "swift rlhf --rlhf_type grpo --model m"
    text = f"{start} {sizes} --generation_batch_size {rollout}"
    if refused:
        with pytest.raises(ValueError, match=rf"generation_batch_size.{rollout}: a rollout has {rollout} completions"):
            convert(text, gpus=1)
    else:
        assert convert(text, gpus=1).config.batch.global_batch_size == 8


@pytest.mark.parametrize(("size", "processes", "accumulated"), [(1, 3, 6), (2, 3, 3), (3, 1, 6), (1, 32, 1)])
def test_micro_batches_that_ms_swift_chose_up_to_3_6_make_at_least_16_completions(
    size: int, processes: int, accumulated: int
) -> None:
    """They are rounded up: 16 / 3 is 6."""
    words = f"--rlhf_type grpo --num_generations 2 --beta 0 --per_device_train_batch_size {size} --vllm_device auto"
    found = convert(f"swift rlhf {words}", gpus=processes)
    assert found.config.batch.global_batch_size == size * processes * accumulated


@pytest.mark.parametrize(
    ("words", "dtype"),
    [("", "bfloat16"), ("--fp16 true", "float16"), ("--fp16 true --bf16 true", "float16"),
     ("--bf16 false", "bfloat16"), ("--torch_dtype float16", "float16"), ("--torch_dtype float32", "float16"),
     ("--torch_dtype float32 --bf16 true", "bfloat16"), ("--torch_dtype float32 --fp16 false", "float32")],
)  # fmt: skip
@pytest.mark.parametrize("start", ["megatron rlhf --train_iters 5", "swift rlhf"])
def test_the_precision_of_ms_swift_is_that_of_fp16_first(start: str, words: str, dtype: str) -> None:
    run = f"{start} --rlhf_type grpo --num_generations 4 --beta 0 {words}"
    assert convert(run, gpus=4).config.model.dtype == dtype


@pytest.mark.parametrize("name", ["rollout", "ref"])
def test_each_pass_of_verl_counts_as_the_update_does_unless_it_has_a_switch_of_its_own(name: str) -> None:
    """verl's defaults of log_prob_use_dynamic_bsz are the actor's use_dynamic_bsz."""
    ours = {"rollout": "logprob", "ref": "reference"}[name]
    actor, own = "actor_rollout_ref.actor", f"actor_rollout_ref.{name}.log_prob"
    sizes = f"{own}_micro_batch_size_per_gpu=4 {own}_max_token_len_per_gpu=20000"
    for switches, size, tokens in (
        (f"{actor}.use_dynamic_bsz=True", None, 20000),
        (f"{actor}.use_dynamic_bsz=True {own}_use_dynamic_bsz=False", 4, None),
        (f"{actor}.use_dynamic_bsz=False {actor}.ppo_micro_batch_size_per_gpu=2", 4, None),
        (f"{actor}.ppo_micro_batch_size_per_gpu=2 {own}_use_dynamic_bsz=True", None, 20000),
    ):
        batch = convert(f"{VERL} {switches} {sizes}").config.batch
        assert getattr(batch, f"{ours}_micro_batch_size") == size, switches
        assert getattr(batch, f"{ours}_micro_batch_tokens") == tokens, switches


def test_an_older_name_beside_its_present_one_is_told() -> None:
    """The present one counts, wherever they stand."""
    run = "swift rlhf --rlhf_type grpo --model m --num_generations 4 --reward_funcs a"
    for words in ("--train_type full --tuner_type lora", "--tuner_type lora --train_type full"):
        found = convert(f"{run} {words}", gpus=1)
        (left,) = (one.why for one in found.left if one.name == "train_type")
        assert "--tuner_type, its present name, is given too" in left
        assert found.config.adapter.type == "lora"


@pytest.mark.parametrize(("window", "told"), [(149, True), (150, False), (300, False), (549, False)])
def test_an_engine_of_verl_has_the_longest_prompt_that_is_left_of_one(window: int, told: bool) -> None:
    """Prompts of at most 500 tokens are cut to 100, so that 150 tokens hold prompt and response."""
    rollout = "actor_rollout_ref.rollout"
    words = f"data.max_prompt_length=500 {rollout}.prompt_length=100 {rollout}.response_length=50"
    found = convert(f"{VERL} {words} {rollout}.max_model_len={window}")
    assert found.config.rollout.max_prompt_length == 100
    note = f"{rollout}.max_model_len={window}: an engine of verl stops there, and here at 150 tokens"
    assert any(line.startswith(note) for line in found.assumed) is told


@pytest.mark.parametrize("given", ["", "$X", "null"])
def test_a_pass_of_verl_without_a_known_budget_has_the_actors(given: str) -> None:
    name = "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"
    words = (
        f"actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=9000 {name}="
    )
    batch = convert(f"{VERL} {words}{given}").config.batch
    assert batch.micro_batch_tokens == 9000 and batch.logprob_micro_batch_tokens in (None, 9000)
    assert convert(f"{VERL} {words}8000").config.batch.logprob_micro_batch_tokens == 8000


@pytest.mark.parametrize(("steps", "before"), [(59, False), (60, False), (61, True)])
def test_epochs_of_verl_that_come_before_its_steps_end_the_run(steps: int, before: bool) -> None:
    """Two epochs of 960 // 32 rollouts are 60 steps of verl."""
    words = f"data.train_batch_size=32 trainer.total_epochs=2 trainer.total_training_steps={steps}"
    found = convert(f"{VERL} {words}", rows=960)
    assert found.config.run.max_steps == min(steps, 60) * (found.config.batch.steps_per_generation or 1)
    assert ("before total_training_steps" in found.text) is before
    assert any("is what the learning rate decays over there" in line for line in found.differs) is before
    assert ("the steps come before 2 epochs" in " ".join(item.why for item in found.left)) is not before
