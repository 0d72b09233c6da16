"""Differences that readers of conversions of verl's examples and recipes found, argument by argument (seconds)."""

from __future__ import annotations

import pytest

from gspo_hpc.importers.convert import Converted, convert

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
OPTIM = f"{ACTOR}.optim"
SIZES = f"data.train_batch_size=64 {ACTOR}.ppo_mini_batch_size=32 actor_rollout_ref.rollout.n=8"
MAIN = f"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {SIZES}"
DAPO = f"python3 -m recipe.dapo.main_dapo algorithm.adv_estimator=grpo {SIZES}"
MEGATRON = MAIN.replace("main_ppo ", "main_ppo --config-name=ppo_megatron_trainer ")


def of(words: str = "", run: str = MAIN, rows: int | None = None) -> Converted:
    return convert(f"{run} {words}", rows=rows)


def told(found: Converted, word: str) -> bool:
    return any(word in line for line in (*found.differs, *found.assumed))


@pytest.mark.parametrize(
    ("words", "notes"),
    [("", True), ("data.truncation=error", True), ("data.filter_overlong_prompts=True", False)]
    + [("data.truncation=left", False)],
)
def test_long_prompts_that_verl_cuts_whatever_truncation_says(words: str, notes: bool) -> None:
    assert told(of(words), "cuts longer prompts of text from the left") is notes


def test_an_epoch_drops_what_is_left_of_the_rows() -> None:
    found = of("trainer.total_epochs=15")
    assert told(found, "an epoch of verl is rows // 64 rollouts, and drops") and found.config.run.max_epochs == 15
    assert of("trainer.total_epochs=15", rows=7473).config.run.max_steps == 7473 // 64 * 15 * 2


@pytest.mark.parametrize(
    ("words", "rows", "notes"),
    [
        ("trainer.total_epochs=15", 7473, True),
        ("trainer.total_epochs=1", 7473, False),
        ("trainer.total_training_steps=500", None, True),
        ("trainer.total_training_steps=117", 7473, True),
        ("trainer.total_training_steps=116", 7473, False),
    ],
)
def test_rows_that_are_left_at_the_end_of_an_epoch_shift_the_next(words: str, rows: int | None, notes: bool) -> None:
    """A rollout here takes its prompts across the end of an epoch."""
    assert told(of(words, rows=rows), "and drops what is left of the rows; here that goes into the next") is notes


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        ("model_engine=megatron", "default bridge for Megatron keeps and sums gradients"),
        (f"model_engine=megatron {ACTOR}.megatron.override_ddp_config.grad_reduce_in_fp32=True", ""),
        ("", "FSDP 1 of verl 0.9 adds up the micro-batches"),
        (f"{ACTOR}.strategy=fsdp", "FSDP 1 of verl 0.9 adds up the micro-batches"),
        (f"{ACTOR}.strategy=fsdp2", ""),
        (f"{ACTOR}.fsdp_config.model_dtype=fp32 {ACTOR}.fsdp_config.dtype=float32", ""),
    ],
)
def test_gradients_that_are_summed_in_16_bits_are_told(words: str, notes: str) -> None:
    found = of(words)
    assert [line for line in found.differs if "gradients in the model's" in line or "FSDP 1 of" in line] == [
        line for line in found.differs if notes and notes in line
    ]
    assert not notes or told(found, notes)
    assert found.config.optimizer.grad_reduce_in_fp32


def test_gradients_of_megatron_are_as_its_buffers_are_configured() -> None:
    name = f"+{ACTOR}.megatron.override_ddp_config.grad_reduce_in_fp32"
    assert not of(f"model_engine=megatron {name}=False").config.optimizer.grad_reduce_in_fp32


def test_megatron_does_not_get_the_betas() -> None:
    words = f"{OPTIM}.betas=[0.8,0.95]"
    assert of(words).config.optimizer.adam_beta1 == 0.8
    found = of(f"model_engine=megatron {words}")
    assert found.config.optimizer.adam_beta1 == 0.9
    assert any(one.name == f"{OPTIM}.betas" and "does not pass it on" in one.why for one in found.left)


@pytest.mark.parametrize("name", ["reward_model.reward_manager", "custom_reward_function.path", "sandbox_fusion.url"])
def test_old_names_of_rewards_that_nothing_reads_are_told(name: str) -> None:
    assert told(of(f"{name}=dapo"), f"{name}: main_ppo of verl 0.9 does not read it")
    assert not told(of("reward.reward_manager.name=dapo"), "main_ppo of verl 0.9 does not read it")


@pytest.mark.parametrize(
    ("words", "held"), [("", "gradients, weights and Adam's"), ("reduce_dtype=bf16", "there, and float32 here")]
)
def test_gradients_that_are_in_16_bits_here_too_are_not_called_float32(words: str, held: str) -> None:
    given = f"{ACTOR}.fsdp_config.model_dtype=bfloat16"
    found = of(f"{given} {ACTOR}.fsdp_config.mixed_precision.{words}" if words else given)
    assert told(found, held) and told(found, "gradients, weights") is not bool(words)
    assert found.config.optimizer.grad_reduce_in_fp32 is not bool(words)
    summed = f"{ACTOR}.fsdp_config.mixed_precision.reduce_dtype=bf16" if words else ""
    assert told(of(summed), "FSDP 1 of verl 0.9 adds up") is not bool(words)


def test_updates_without_an_advantage_are_steps_there() -> None:
    text = "an update in which no completion has an advantage makes no step here; in verl Adam steps"
    assert told(of(), text) and not told(of(f"{ACTOR}.use_kl_loss=True"), text)
    assert not told(of(f"{ACTOR}.entropy_coeff=0.01"), text)


@pytest.mark.parametrize(("engine", "masked"), [("vllm", True), ("sglang", False)])
def test_tokens_that_the_tokenizer_lacks(engine: str, masked: bool) -> None:
    text = "never samples tokens that the tokenizer lacks"
    assert told(of(f"actor_rollout_ref.rollout.name={engine}"), text) is masked


@pytest.mark.parametrize("parts", [1, 2])
def test_means_of_router_losses_with_context_parallelism(parts: int) -> None:
    words = f"{ACTOR}.megatron.context_parallel_size={parts} {ACTOR}.megatron.override_transformer_config."
    found = of(f"{words}moe_z_loss_coeff=0.01", MEGATRON)
    assert told(found, "losses of the routers are means") and told(found, "the mean is over the whole") is (parts > 1)


def test_what_one_epoch_leaves_of_the_rows_has_no_next_one() -> None:
    one = of("trainer.total_epochs=1")
    assert told(one, "drops what is left of the rows; here up to 1 more updates are made of it: --rows N")
    assert not told(of(f"trainer.total_epochs=1 {ACTOR}.ppo_mini_batch_size=64"), "what is left of the rows")
    assert told(of("trainer.total_epochs=2"), "here that goes into the next epoch: --rows N")


def test_engines_of_verl_0_7_merge_adapters_where_megatron_trains() -> None:
    adapters = f"{MODEL}.lora.rank=8"
    assert told(of(adapters, MEGATRON), "engines of verl 0.9 compute with adapters beside the weights")
    assert told(of(adapters, MEGATRON), "so do they in verl 0.7 with Megatron")
    fsdp = of(f"{MODEL}.lora_rank=8")
    assert told(fsdp, "engines of verl compute with adapters") and not told(fsdp, "so do they in verl 0.7")


def test_an_evaluation_of_every_step_has_the_last() -> None:
    words = "algorithm.filter_groups.enable=True trainer.test_freq="
    assert told(of(f"{words}5", DAPO), "the DAPO recipe does not evaluate after its last step")
    assert not told(of(f"{words}1", DAPO), "does not evaluate after its last step")


def test_a_size_of_an_sbatch_line_is_not_called_the_scripts_default() -> None:
    run = f"{MAIN} trainer.n_gpus_per_node=${{SLURM_GPUS_ON_NODE:-2}}"
    found = convert(f"#!/bin/bash\n#SBATCH --gres=gpu:4\n{run}")
    assert found.config.cluster.gpus_per_node == 4
    assert told(found, "$SLURM_GPUS_ON_NODE: 4, by a line #SBATCH") and not told(found, "the script's default is taken")
    assert told(convert(run), "$SLURM_GPUS_ON_NODE: the script's default is taken, and decides")


def test_a_division_of_experts_is_known() -> None:
    assert of("actor_rollout_ref.rollout.moe_tensor_parallel_size=1").strange == ()


def test_gradients_of_the_bridge_that_a_script_chooses() -> None:
    given = of(f"{ACTOR}.megatron.vanilla_mbridge=False", MEGATRON)
    assert told(given, "Megatron-Bridge (vanilla_mbridge=False) keeps") and not told(given, "as with mbridge")
    assert any("it always chooses the bridge" in line for line in given.dropped)
    assert told(of("", MEGATRON), "as with mbridge, the default of 0.7, and")


def test_heads_that_predict_several_tokens_move_the_weights_without_an_advantage() -> None:
    found = of("actor_rollout_ref.model.mtp.enable_train=True")
    assert not told(found, "no completion has an advantage")
    assert any("their loss is left out" in line for line in found.dropped)


def test_an_overflow_ends_a_run_of_verl() -> None:
    words = f"{ACTOR}.megatron.dtype=float16"
    assert told(of(words, MEGATRON), "an overflow of the loss scale ends a run of verl with Megatron")


def test_every_old_name_of_a_reward_is_told() -> None:
    words = "reward_model.reward_manager=dapo custom_reward_function.path=a.py custom_reward_function.name=b"
    names = "reward_model.reward_manager, custom_reward_function.path, custom_reward_function.name"
    assert told(of(words), f"{names}: main_ppo of verl 0.9 reads none of them")


def test_reasons_of_engine_arguments() -> None:
    ours = "actor_rollout_ref.rollout."
    words = f"+{ours}engine_kwargs.vllm.max-model-len=32768 +{ours}engine_kwargs.vllm.tool-call-parser=hermes"
    why = {one.name.rpartition(".")[2]: one.why for one in of(f"{words} {ours}quantization=fp8").left}
    assert "follows from rollout.max_prompt_length" in why["max-model-len"]
    assert "calls no tools" in why["tool-call-parser"] and "rollout.engine (quantization)" in why["quantization"]


def test_time_limits_of_a_server_are_known() -> None:
    found = of("actor_rollout_ref.rollout.server.timeout=60 actor_rollout_ref.rollout.server.of_nobody=1")
    assert any("server.timeout" in line for line in found.dropped)
    assert ["server.of_nobody" in argument.given for argument in found.strange] == [True]


def test_an_epoch_of_the_dapo_recipe_is_made_of_what_it_draws() -> None:
    """Groups that are left out are lost: an epoch has as many rollouts as draws at most."""
    words = "algorithm.filter_groups.enable=True data.gen_batch_size=192 trainer.total_epochs=2"
    assert told(of(words, DAPO), "an epoch of verl is at most rows // 192 rollouts")
    assert of(words, DAPO, 1920).config.run.max_steps == 1920 // 192 * 2 * 2
    assert of(f"{words} trainer.total_training_steps=25", DAPO, 1920).config.run.max_steps == 20 * 2
    assert told(of(words.replace("=True", "=False"), DAPO), "an epoch of verl is rows // 192 rollouts")


def test_a_folder_of_adapters_alone_switches_them_on() -> None:
    adapter = of(f"{MODEL}.lora_adapter_path=/adapters").config.adapter
    assert (adapter.type, str(adapter.path)) == ("lora", "/adapters")
    assert (
        of().config.adapter.type is None and of(f"{MODEL}.lora_adapter_path=/a", MEGATRON).config.adapter.type is None
    )


@pytest.mark.parametrize("words", ["", f"{MODEL}.lora.target_modules=[linear_qkv,linear_proj]"])
def test_megatron_has_one_first_matrix_for_fused_layers_also_by_default(words: str) -> None:
    assert "one first matrix for all of its layers there" in of(f"{MODEL}.lora.rank=8 {words}", MEGATRON).text


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        (f"{ACTOR}.optim.lr_warmup_steps=10", True),
        (f"{ACTOR}.optim.lr_scheduler_type=cosine", True),
        ("", False),
        (f"{ACTOR}.optim.lr_warmup_steps=10 {ACTOR}.ppo_mini_batch_size=64", False),
    ],
)
def test_the_rate_moves_once_a_rollout(words: str, notes: bool) -> None:
    assert told(of(words), "moves the learning rate once a rollout") is notes


@pytest.mark.parametrize(
    ("words", "run", "notes"),
    [
        ("", MAIN, True),
        (f"{ACTOR}.optim.weight_decay=0", MAIN, False),
        (f"{MODEL}.lora_rank=8", MAIN, False),
        ("", MEGATRON, False),
    ],
)
def test_weights_without_a_second_dimension_decay_with_fsdp(words: str, run: str, notes: bool) -> None:
    assert told(of(words, run), "norms and biases decay, too") is notes


@pytest.mark.parametrize(
    ("words", "later"),
    [("", "1 here"), (f"{ACTOR}.optim.clip_grad=0.5", "0.5 here"), (f"{ACTOR}.optim.clip_grad=0.3", "")],
)
def test_a_bound_of_gradients_that_later_versions_do_not_read(words: str, later: str) -> None:
    found = of(f"{ACTOR}.grad_clip=0.3 {words}")
    assert found.config.optimizer.clip_grad == 0.3
    assert told(found, f"since 0.8 optim.clip_grad counts alone, {later}") is bool(later)


def test_gradients_are_summed_in_the_type_that_fsdp_is_told() -> None:
    name = f"{ACTOR}.fsdp_config.mixed_precision.reduce_dtype"
    assert not of(f"{name}=bf16").config.optimizer.grad_reduce_in_fp32
    assert of(f"{name}=fp32").config.optimizer.grad_reduce_in_fp32 and of().config.optimizer.grad_reduce_in_fp32


def test_the_first_loss_scale_is_that_of_verls_megatron() -> None:
    assert of(f"{ACTOR}.megatron.dtype=float16", MEGATRON).config.optimizer.initial_loss_scale == 32768
    assert of("", MEGATRON).config.optimizer.initial_loss_scale == of().config.optimizer.initial_loss_scale == 65536


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        (f"{MODEL}.path=deepseek-ai/DeepSeek-V3", True),
        (f"{MODEL}.path=moonshotai/Moonlight-16B-A3B", True),
        (f"{MODEL}.path=/models/dsv3", True),
        (f"{MODEL}.path=deepseek-ai/DeepSeek-R1", True),
        (f"{MODEL}.path=deepseek-ai/DeepSeek-R1-Distill-Qwen-7B trainer.experiment_name=deepseek671b", True),
        (f"{MODEL}.path=deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", False),
        (f"{MODEL}.path=/models/DeepSeek-V2", False),
        (
            f"{MODEL}.path=deepseek-ai/DeepSeek-V3 "
            f"+{ACTOR}.megatron.override_transformer_config.moe_router_bias_update_rate=0",
            False,
        ),
        (f"{MODEL}.path=Qwen/Qwen3-30B-A3B", False),
    ],
)
def test_a_bias_of_routers_that_moves_is_told(words: str, notes: bool) -> None:
    assert told(of(words, MEGATRON), "the bias of this model's routers moves") is notes


def test_models_that_read_images_are_told() -> None:
    for name, sees in (("Qwen2.5-VL-7B-Instruct", True), ("Qwen3.5-122B-A10B", True), ("Qwen3-8B", False)):
        assert told(of(f"{MODEL}.path=Qwen/{name}"), "reads images") is sees


def test_classes_of_the_scripts_own_are_told() -> None:
    assert told(of("+data.custom_cls.path=gym/dataset.py"), "that class decides which prompts there are")
    loop = "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=gym.Manager"
    assert told(of(loop), "that class decides how a rollout is sampled")
    assert not told(of(), "that class decides")


def test_scales_of_fp8_that_a_variable_decides_are_carried_over() -> None:
    fp8 = f"+{ACTOR}.megatron.override_transformer_config.fp8=hybrid"
    run = f"export NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1\n{MEGATRON}"
    assert of(fp8, run).config.slurm.environment == {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}
    assert of("", run).config.slurm.environment == {} == of(fp8, MEGATRON).config.slurm.environment


def test_the_bound_of_the_divergence_is_told() -> None:
    word = "low_var_kl: a token's estimate of the divergence is 10 at most there"
    assert told(of(f"{ACTOR}.use_kl_loss=True"), word) and not told(of(), word)
    assert not told(of(f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=mse"), word)


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        ("", True),
        ("trainer.balance_batch=True", True),
        ("trainer.balance_batch=False", True),
        (f"{ACTOR}.ppo_mini_batch_size=64", False),
        (f"{ACTOR}.ppo_mini_batch_size=64 {ACTOR}.ppo_epochs=2", False),
    ],
)
def test_updates_that_hold_parts_of_groups_are_told(words: str, notes: bool) -> None:
    """One update has all of its rollout, in whatever order. verl 0.9 reads no switch."""
    found = of(words)
    assert told(found, "in the order in which its completions were finished, short ones first") is notes
    assert told(found, "0.7 in that of the prompts (trainer.balance_batch=False)") is ("balance_batch=False" in words)


def test_a_schedule_that_the_end_of_the_epochs_cuts_off_is_told() -> None:
    words = "trainer.total_training_steps=500 trainer.total_epochs=5"
    assert told(of(words, rows=2101), "is what the learning rate decays over there")
    assert not told(of(words, rows=10**6), "is what the learning rate decays over there")


def test_betas_of_megatron_that_are_passed_on() -> None:
    words = f"model_engine=megatron +{OPTIM}.override_optimizer_config.adam_beta2=0.95"
    assert of(words).config.optimizer.adam_beta2 == 0.95
    assert of(words.replace("model_engine=megatron ", "")).config.optimizer.adam_beta2 == 0.999


def test_veomni_warms_up_by_the_ratio_alone() -> None:
    words = f"{OPTIM}.lr_warmup_steps=10"
    assert of(words).config.optimizer.lr_warmup_steps == 20
    found = of(f"model_engine=veomni {words}")
    assert found.config.optimizer.lr_warmup_steps == 0
    assert any(one.name.endswith("lr_warmup_steps") and "VeOmni reads" in one.why for one in found.left)


@pytest.mark.parametrize(
    ("words", "word", "notes"),
    [
        (f"{MODEL}.lora_rank=8", "compute with adapters beside the weights", True),
        ("", "compute with adapters beside the weights", False),
        (f"model_engine=megatron {MODEL}.lora.rank=8 {MODEL}.lora.merge=True", "compute with adapters beside", False),
        (
            f"model_engine=megatron {MODEL}.path=Qwen/Qwen3-VL-30B-A3B-Instruct",
            "the merger of images alone",
            True,
        ),
        (f"{MODEL}.path=Qwen/Qwen3-VL-30B-A3B-Instruct", "the merger of images alone", False),
        (f"model_engine=megatron {MODEL}.path=Qwen/Qwen3-VL-8B-Instruct", "the merger of images alone", False),
        (f"{MODEL}.path=ByteDance-Seed/Seed-OSS-36B-Instruct", "updates have the dropout", True),
        (f"{MODEL}.path=Qwen/Qwen3-8B", "updates have the dropout", False),
        (
            f"model_engine=megatron +{ACTOR}.megatron.override_transformer_config.moe_z_loss_coeff=0.001",
            "losses of the routers are means",
            True,
        ),
        ("model_engine=megatron", "losses of the routers are means", False),
    ],
)
def test_what_a_second_reader_found(words: str, word: str, notes: bool) -> None:
    assert told(of(words), word) is notes


def test_the_reference_of_adapters_from_a_folder_is_told() -> None:
    """The model without adapters is left where they are switched off."""
    words = f"{MODEL}.lora_adapter_path=/adapters {ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0.01"
    assert told(of(words), "the model without adapters in verl, and here the model with those of adapter.path")
    assert not told(of(f"{MODEL}.lora_adapter_path=/adapters"), "the model without adapters in verl")
    assert not told(of(f"{MODEL}.lora_rank=8 {ACTOR}.use_kl_loss=True"), "the model without adapters in verl")


@pytest.mark.parametrize(("words", "notes"), [("data.truncation=left", True), ("", False)])
def test_prompts_that_end_a_run_of_an_earlier_version(words: str, notes: bool) -> None:
    assert told(of(words), "verl 0.7 does not read it, and ends the run at a prompt that is too long") is notes


def test_a_default_in_a_comment_is_none() -> None:
    run = f"{MAIN} trainer.n_gpus_per_node=$SLURM_GPUS_PER_NODE"
    comment = "# export SLURM_GPUS_PER_NODE=${SLURM_GPUS_PER_NODE:-8}\n"
    assert not told(convert(comment + run), "the script's default is taken")
    assert told(convert(comment.removeprefix("# ") + run), "the script's default is taken")


BATCH = "#!/bin/bash\n#SBATCH --job-name=x\n#SBATCH --nodes=4\n#SBATCH --gres=gpu:h100:2\nsource config.env\n"


@pytest.mark.parametrize(
    ("head", "words", "nodes", "gpus"),
    [
        (BATCH, "trainer.nnodes=${SLURM_JOB_NUM_NODES} trainer.n_gpus_per_node=$SLURM_GPUS_ON_NODE", 4, 2),
        (BATCH.replace("--nodes=4", "-N 16"), "trainer.nnodes=$SLURM_NNODES", 16, 8),
        (BATCH + "export SLURM_NNODES=3\n", "trainer.nnodes=$SLURM_NNODES", 3, 8),
        (BATCH, "trainer.nnodes=2", 2, 8),
    ],
)
def test_sizes_that_the_lines_of_sbatch_give(head: str, words: str, nodes: int, gpus: int) -> None:
    found = convert(f"{head}{MAIN} {words}")
    assert (found.config.cluster.nodes, found.config.cluster.gpus_per_node) == (nodes, gpus)
    assert told(found, "by a line #SBATCH; sbatch may be given another") is ("$" in words)
    assert "config.env" not in " ".join(line for line in found.assumed if "SLURM_" in line)


def test_the_evaluation_that_the_dapo_recipe_leaves_out_is_told() -> None:
    words = "algorithm.filter_groups.enable=True trainer.test_freq=5"
    assert told(of(words, DAPO), "does not evaluate after its last step where epochs end the run")
    assert not told(of(words.replace("5", "-1"), DAPO), "does not evaluate after its last step")


def test_an_old_penalty_for_long_answers_counts_no_longer() -> None:
    found = of("+reward_model.overlong_buffer.enable=True", DAPO)
    assert any("since 0.7 nothing does" in one.why for one in found.left if "overlong_buffer" in one.name)
    kept = of("reward.reward_kwargs.overlong_buffer_cfg.enable=True", DAPO)
    assert any("the function length is it" in one.why for one in kept.left if "overlong_buffer" in one.name)


def test_fsdp_in_16_bits_keeps_everything_in_them() -> None:
    kept = f"model_engine=megatron {ACTOR}.megatron.override_ddp_config.grad_reduce_in_fp32=True"
    assert not told(of(f"{kept} {ACTOR}.fsdp_config.model_dtype=bfloat16"), "Adam's moments have"), (
        "Megatron reads none"
    )
    found = of(f"{ACTOR}.fsdp_config.model_dtype=bfloat16")
    assert told(found, "Adam's moments have the model's 16 bits there") and not told(
        found, "FSDP 1 of verl 0.9 adds up"
    )


def test_an_epoch_of_the_dapo_recipe_uses_up_what_it_draws() -> None:
    """Here an epoch counts the prompts that are trained on: a third of an epoch makes as many updates."""
    words = "algorithm.filter_groups.enable=True data.gen_batch_size=192 trainer.total_epochs=3"
    assert of(words, DAPO).config.run.max_epochs == pytest.approx(1.0)
    assert of(words.replace("192", "64"), DAPO).config.run.max_epochs == 3


def test_saves_of_the_dapo_recipe() -> None:
    assert "the DAPO recipe saves the last step alone" in of(run=DAPO).text
    assert "verl saves nothing" in of().text


def test_rows_decide_whether_verl_goes_on_for_several_turns() -> None:
    assert told(of("actor_rollout_ref.rollout.multi_turn.enable=True"), "where the rows have an agent_name")


NORM = f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm algorithm.norm_adv_by_std_in_grpo=False"


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        ("", ("which may be less than rollout.max_response_length",)),
        (f"{ACTOR}.loss_scale_factor=512", ()),  # the longest response by default
        (f"{ACTOR}.loss_scale_factor=1024", ("loss and gradient are 0.5 times as large there",)),
    ],
)
def test_the_sum_of_tokens_by_a_length_is_a_fixed_length(words: str, notes: tuple[str, ...]) -> None:
    """Dr. GRPO: since verl 0.8 the sum is divided by completions and length, as here."""
    found = of(f"{NORM} {words}")
    ours = found.config.algorithm
    assert (ours.name, ours.aggregation, ours.normalize_advantage) == ("grpo", "fixed_length", False)
    assert (ours.clip_low, ours.dual_clip) == (0.2, 3.0)
    assert told(found, "seq-mean-token-sum-norm: up to verl 0.7 the sum of a micro-batch")
    every = ("which may be less than rollout.max_response_length", "times as large there")
    assert [told(found, text) for text in every] == [any(text in note for note in notes) for text in every]
    assert all(told(found, note) for note in notes)
    assert not told(found, "token-mean: up to verl 0.7")
    assert not told(of(), "seq-mean-token-sum-norm")


def test_a_fixed_length_with_other_objectives_of_verl() -> None:
    assert of(f"{NORM} {ACTOR}.policy_loss.loss_mode=cispo").config.algorithm.aggregation == "fixed_length"
    assert of(f"{NORM} {ACTOR}.policy_loss.loss_mode=gspo").config.algorithm.aggregation == "sequence"


def test_what_bridges_of_megatron_did_by_version_is_told() -> None:
    assert told(of(run=MEGATRON), "with mbridge, the default of 0.7, and with verl's own loading before")


def test_verl_0_2_leaves_out_the_last_rollout() -> None:
    assert told(of(), "the last of all rollouts left out (up to 0.2.0.post2)")
    assert told(of("trainer.total_training_steps=9"), "the last of all rollouts left out")
    for later in (f"{ACTOR}.loss_agg_mode=token-mean", "actor_rollout_ref.rollout.val_kwargs.n=1"):
        assert not told(of(later), "the last of all rollouts left out")
