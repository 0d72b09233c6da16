"""Defaults of earlier versions, epochs, shares of the data and offloading, as their projects mean them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_hpc.importers.convert import convert

SWIFT = "NPROC_PER_NODE=4 swift rlhf --rlhf_type grpo --num_generations 4"
MEGATRON_SWIFT = "NPROC_PER_NODE=4 megatron rlhf --rlhf_type grpo --num_generations 4"
ACTOR = "actor_rollout_ref.actor"
VERL = (
    "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64 "
    f"{ACTOR}.ppo_mini_batch_size=32 actor_rollout_ref.rollout.n=8"
)
TRL = "accelerate launch --num_processes 4 grpo.py --num_generations 4 --per_device_train_batch_size 4"


def why(run: str) -> dict[str, str]:
    return {item.name: item.why for item in convert(run).left}


@pytest.mark.parametrize("run", [SWIFT, MEGATRON_SWIFT])
def test_train_type_is_an_argument_of_ms_swift_3_whose_defaults_count_then(run: str) -> None:
    third, fourth = convert(f"{run} --train_type full"), convert(f"{run} --tuner_type full")
    assert (third.config.rollout.top_p, third.config.rollout.top_k) == (0.9, 50)
    assert (fourth.config.rollout.top_p, fourth.config.rollout.top_k) == (1.0, -1)
    assert any("train_type is an argument of ms-swift 3" in line for line in third.assumed)
    assert [line for line in fourth.assumed if "earlier versions" in line] == [
        "defaults are those of ms-swift 4.5; earlier versions had top_p 0.9 (up to 4.0.2); top_k 50 (up to 4.0.2)"
    ]
    given = convert(f"{run} --train_type full --top_p 1 --top_k 7").config.rollout
    assert (given.top_p, given.top_k) == (1.0, 7)


def test_defaults_that_earlier_versions_had_are_told_where_they_count() -> None:
    def told(run: str) -> list[str]:
        return [line for line in convert(run).assumed if line.startswith("defaults are those of ")]

    assert told(SWIFT) == [
        "defaults are those of ms-swift 4.5; earlier versions had top_p 0.9 (up to 4.0.2); top_k 50 (up to 4.0.2); "
        "split_dataset_ratio 0.01 (up to 3.5); loss_type bnpo, a mean over the tokens of a micro-batch (up to 3.3); "
        "adam_beta2 0.999 (up to 3.2.1); repetition_penalty that of the model's generation_config, as top_p and top_k "
        "(up to 3.1)"
    ]
    assert "loss_type" not in told(f"{SWIFT} --use_vllm true --vllm_mode colocate")[0]
    assert "loss_type" not in told(MEGATRON_SWIFT)[0]
    assert not told(f"{SWIFT} --train_type full")
    assert not told(f"{SWIFT} --tuner_type full --top_p 1 --top_k 50")
    assert told(VERL) == [
        f"defaults are those of verl 0.9; earlier versions had {ACTOR}.entropy_coeff 0.001 (up to 0.3); "
        f"{ACTOR}.clip_ratio_c none, as algorithm.dual_clip 0 (up to 0.3.0); algorithm.use_kl_in_reward true, with a "
        "kl_coef of 0.001 unless it is given (up to 0.3.0); data.filter_overlong_prompts true (up to 0.2); "
        "the last of all rollouts left out (up to 0.2.0.post2)"
    ]
    assert f"{ACTOR}.optim.lr_decay_style linear (0.4.1)" in told(f"{VERL} model_engine=megatron")[0]
    given = f"{ACTOR}.entropy_coeff=0 {ACTOR}.clip_ratio_c=3 data.filter_overlong_prompts=False"
    assert not told(f"{VERL} {given} algorithm.use_kl_in_reward=False")
    assert not told(f"{VERL} {given} {ACTOR}.use_kl_loss=True")  # then nothing was taken from the reward
    assert "clip_ratio_c" not in told(f"{VERL} {ACTOR}.policy_loss.loss_mode=gspo")[0]  # it has no such bound


def test_clip_ratio_of_verl_up_to_0_3_is_told() -> None:
    found = convert(f"{VERL} {ACTOR}.clip_ratio=0.3")
    assert found.config.algorithm.clip_low == 0.2
    assert any("clip_ratio=0.3: verl does not read it since 0.4" in line for line in found.assumed)
    assert not any("since 0.4" in line for line in convert(f"{VERL} {ACTOR}.clip_ratio=0.2").assumed)


def test_trl_generates_256_tokens_where_nothing_is_said() -> None:
    assert convert(TRL).config.rollout.max_response_length == 256
    assert convert(SWIFT).config.rollout.max_response_length == 512


@pytest.mark.parametrize(
    ("run", "argument", "default"),
    [(TRL, "lr_scheduler_type=$STYLE", "linear"), (MEGATRON_SWIFT, "--lr_decay_style $STYLE", "cosine"),
     (VERL, f"{ACTOR}.optim.lr_scheduler_type=$STYLE", "constant")],
)  # fmt: skip
def test_a_schedule_that_is_not_known_is_the_default_and_open(run: str, argument: str, default: str) -> None:
    found = convert(f"{run} {'--' if run == TRL else ''}{argument}")
    assert found.config.optimizer.lr_decay_style == default and found.open == (argument,)


def test_an_optimizer_that_is_not_known_is_open_and_another_one_refused() -> None:
    assert convert(f"{TRL} --optim $OPTIM").open == ("optim=$OPTIM",)
    assert why(f"{TRL} --optim paged_adamw_8bit")["optim"] == "it is AdamW here in any case"
    with pytest.raises(ValueError, match="optim lion: there is only AdamW here"):
        convert(f"{TRL} --optim lion")


@pytest.mark.parametrize(
    "run", [f"{SWIFT} --multi_turn_scheduler tip", f"{VERL} actor_rollout_ref.rollout.multi_turn.enable=True"]
)
def test_a_rollout_of_several_turns_is_told_loudly(run: str) -> None:
    assert any("the original goes on for several turns" in line for line in convert(run).assumed)


@pytest.mark.parametrize(
    ("run", "default"),
    [(f"{VERL} trainer.total_epochs=3", 30), (f"{TRL} --num_train_epochs 3", 3), (f"{SWIFT} --num_train_epochs 3", 3),
     (f"{MEGATRON_SWIFT} --num_train_epochs 3", None)],
)  # fmt: skip
def test_epochs_become_max_epochs_where_neither_steps_nor_rows_are_known(run: str, default: int | None) -> None:
    found = convert(run)
    assert found.config.run.max_epochs == 3 and found.config.run.max_steps is None
    assert not any("--rows" in line for line in found.assumed)
    with_rows = convert(run, rows=640)
    assert with_rows.config.run.max_epochs is None and with_rows.config.run.max_steps
    assert convert(run.rsplit(" ", 1 if "=" in run.split()[-1] else 2)[0]).config.run.max_epochs == default


def test_half_an_epoch_of_trl_is_half_an_epoch() -> None:
    assert convert(f"{TRL} --num_train_epochs 0.5").config.run.max_epochs == 0.5


@pytest.mark.parametrize("run", [SWIFT, MEGATRON_SWIFT])
def test_the_share_that_ms_swift_holds_out_is_the_rest_of_train_ratio(run: str) -> None:
    found = convert(f"{run} --split_dataset_ratio 0.01 --eval_steps 20")
    assert found.config.data.train_ratio == 0.99 and found.config.eval.interval == 20
    none = convert(f"{run} --split_dataset_ratio 0 --eval_steps 20")
    assert none.config.data.train_ratio == 1.0 and none.config.eval.interval is None
    assert "split_dataset_ratio" in {item.name for item in none.carried}
    reason = "since 3.6 ms-swift evaluates nothing without val_dataset or split_dataset_ratio"
    assert why(f"{run} --eval_steps 20")["eval_steps"] == reason
    beside = f"{run} --split_dataset_ratio 0.1 --val_dataset v.jsonl --eval_steps 20"
    assert (
        convert(beside).config.data.train_ratio == 1.0 and "beside a val_dataset" in why(beside)["split_dataset_ratio"]
    )
    assert convert(beside).config.eval.interval == 20
    with pytest.raises(ValueError, match="split_dataset_ratio 1: must be below 1: nothing is left to train on"):
        convert(f"{run} --split_dataset_ratio 1")


def test_ms_swift_evaluates_as_often_as_it_saves() -> None:
    found = convert(f"{SWIFT} --split_dataset_ratio 0.1 --save_steps 40")
    assert found.config.eval.interval == found.config.checkpoint.interval == 40
    off = convert(f"{SWIFT} --split_dataset_ratio 0.1 --eval_strategy no")
    assert off.config.eval.interval is None and off.config.data.train_ratio == 1.0


@pytest.mark.parametrize("engine", ["megatron", "fsdp_config"])
@pytest.mark.parametrize(
    ("moved", "parts"),
    [("param", ("weights", "gradients")), ("optimizer", ("optimizer",)),
     ("param optimizer", ("weights", "gradients", "optimizer"))],
)  # fmt: skip
def test_what_verl_moves_to_host_memory_is_told_apart(engine: str, moved: str, parts: tuple[str, ...]) -> None:
    words = [f"{ACTOR}.{engine}.{name}_offload={name in moved.split()}" for name in ("param", "optimizer")]
    found = convert(" ".join([VERL, *words]))
    expected = parts if engine == "fsdp_config" else tuple(part for part in parts if part != "gradients")
    assert found.config.memory.offload_trainer is True and found.config.memory.offload_parts == expected
    assert {f"{ACTOR}.{engine}.{name}_offload" for name in ("param", "optimizer")} <= {
        item.name for item in found.carried
    }


def test_nothing_moved_is_said_of_megatron_and_left_to_our_default_for_fsdp() -> None:
    assert convert(f"{VERL} {ACTOR}.megatron.param_offload=False").config.memory.offload_trainer is False
    run = f"{VERL} {ACTOR}.fsdp_config.param_offload=False"
    assert (
        convert(run).config.memory.offload_trainer is None
        and "by default" in why(run)[f"{ACTOR}.fsdp_config.param_offload"]
    )


def test_ms_swift_moves_model_and_optimizer_apart() -> None:
    memory = convert(f"{SWIFT} --offload_model true --offload_optimizer false").config.memory
    assert memory.offload_trainer is True and memory.offload_parts == ("weights", "gradients")
    assert convert(f"{MEGATRON_SWIFT} --offload_optimizer true").config.memory.offload_parts == ("optimizer",)


def test_another_objective_of_a_verl_of_ones_own_is_refused() -> None:
    with pytest.raises(ValueError, match=r"actor\.loss_mode=kl_cov is another objective"):
        convert(f"{VERL} {ACTOR}.loss_mode=kl_cov")
    assert convert(f"{VERL} {ACTOR}.loss_mode=gspo").config.algorithm.name == "gspo"
    with pytest.raises(ValueError, match=r"trainer\.loss_type=x: verl has no argument of this name"):
        convert(f"{VERL} trainer.loss_type=x")


def test_an_argument_that_is_added_to_verl_is_unknown_and_may_change_the_run() -> None:
    found = convert(f"{VERL} max_turns=4 search_engine=online")
    assert [item.name for item in found.strange] == ["max_turns", "search_engine"]
    assert any(
        "2 arguments are no known arguments of verl, and may change what is trained" in line for line in found.assumed
    )
    with pytest.raises(ValueError, match="experiment=large: it chooses a file of settings"):
        convert(f"{VERL} +experiment=large")


def test_checkpoints_of_which_none_is_deleted() -> None:
    run = f"{VERL} trainer.max_actor_ckpt_to_keep="
    assert convert(f"{run}3").config.checkpoint.keep == 3
    assert convert(f"{run}0").config.checkpoint == convert(VERL).config.checkpoint
    assert why(f"{run}0")["trainer.max_actor_ckpt_to_keep"] == "all are kept there; here checkpoint.keep is how many"


@pytest.mark.parametrize("run", [TRL, SWIFT, MEGATRON_SWIFT])
def test_it_is_told_where_the_original_keeps_more_checkpoints(run: str) -> None:
    line = "checkpoints: all are kept in the original, and the last 2 here (checkpoint.keep)"
    assert line in convert(run).differs and line in convert(f"{run} --save_total_limit 0").differs
    assert line not in convert(f"{run} --save_total_limit 3").differs
    if run != MEGATRON_SWIFT:
        assert line not in convert(f"{run} --save_strategy no").differs


def test_what_is_always_so_here_is_said_of_what_is_off_there() -> None:
    name = "actor_rollout_ref.model.use_remove_padding"
    assert why(f"{VERL} {name}=False")[name] == "sequences are always packed here"


def test_variables_of_wandb_are_carried_over_where_the_run_sees_them() -> None:
    tracking = convert(f"export WANDB_PROJECT=p WANDB_MODE=offline\nWANDB_ENTITY=e {TRL}").config.tracking
    assert (tracking.wandb_project, tracking.wandb, tracking.wandb_entity) == ("p", "offline", "e")
    assert convert(f"WANDB_PROJECT=p\n{TRL}").config.tracking.wandb_project == "gspo_hpc"
    given = convert(f"export WANDB_PROJECT=p\n{VERL} trainer.project_name=q").config.tracking
    assert given.wandb_project == "q"


def test_a_number_of_nodes_that_is_not_known_is_open() -> None:
    run = "NNODES=$WORLD_SIZE torchrun --nproc_per_node=8 --nnodes=$WORLD_SIZE swift/cli/rlhf.py --rlhf_type grpo"
    found = convert(f"{run} --num_generations 4")
    assert found.open == ("NNODES=$WORLD_SIZE",) and found.config.cluster.nodes == 1


def test_a_yaml_of_trl_with_a_mixture_of_data_is_no_run_of_open_instruct() -> None:
    text = "num_generations: 4\nmax_completion_length: 64\nlearning_rate: 1e-6\ndataset_mixer: {a/b: 1.0}\n"
    assert convert(text).project == "TRL"
    with pytest.raises(ValueError, match="this is a run of open-instruct"):
        convert("dataset_mixer: {a/b: 1.0}\nlearning_rate: 1e-6\nmax_seq_length: 64\n")


@pytest.mark.parametrize(
    ("words", "sign", "aggregation"),
    [
        ("--tools_prompt react_zh", "tools_prompt", "token"),  # up to 3.3
        ("--tools_prompt react_zh --train_type full", "tools_prompt", "token"),
        ("--num_infer_workers 2", "num_infer_workers", "sequence"),  # up to 3.5: it may have been a mean over tokens
        ("--tensor_parallel_size 2", "tensor_parallel_size", "sequence"),
        ("--tools_prompt react_zh --loss_type grpo", "tools_prompt", "sequence"),
    ],
)
def test_arguments_that_are_gone_show_version_3_of_ms_swift_and_its_loss(
    words: str, sign: str, aggregation: str
) -> None:
    found = convert(f"{SWIFT} {words}")
    assert found.config.algorithm.aggregation == aggregation
    assert (found.config.rollout.top_p, found.config.rollout.top_k) == (0.9, 50)
    told = next(line for line in found.assumed if line.startswith(f"{sign} is an argument of ms-swift 3"))
    assert "adam_beta2 0.999 (up to 3.2.1)" in told
    assert ("loss_type bnpo, a mean over the tokens of a micro-batch (up to 3.3)" in told) is (
        aggregation == "sequence" and "loss_type" not in words
    )


@pytest.mark.parametrize(
    ("run", "evaluated"),
    [
        (f"{SWIFT} --val_dataset test.jsonl --eval_steps 5", (5, False, True)),
        (f"{SWIFT} --val_dataset test.jsonl --eval_steps 5 --eval_on_start true", (5, True, True)),
        (SWIFT, (None, True, True)),  # nothing is held out: ours say nothing
    ],
)
def test_ms_swift_evaluates_at_its_own_steps_and_at_the_last(
    run: str, evaluated: tuple[int | None, bool, bool]
) -> None:
    found = convert(run)
    assert (found.config.eval.interval, found.config.eval.before, found.config.eval.after) == evaluated
    assert any("an evaluation samples there" in line for line in found.differs) is (evaluated[0] is not None)


def test_rlft_is_a_command_of_ms_swift() -> None:
    found = convert("torchrun --nproc_per_node 4 swift/cli/rlft.py --rlhf_type grpo --model m --num_generations 4")
    assert found.project == "ms-swift"


def test_the_option_gpus_takes_precedence_and_says_so_with_both_numbers() -> None:
    found = convert(SWIFT, gpus=8)
    assert (found.config.cluster.nodes, found.config.cluster.gpus_per_node) == (1, 8)
    assert "--gpus 8 takes precedence over what the file gives: 1 x 4 GPUs" in found.assumed
    assert not any("takes precedence" in line for line in convert(SWIFT, gpus=4).assumed)
    on_ray = "rlhf_type: grpo\nnum_generations: 4\nuse_ray: true\ntrain:\n  gpus: 4\nrollout:\n  gpus: 2\n"
    for gpus, carried in ((None, True), (8, False)):
        found = convert(on_ray, source="megatron-swift", gpus=gpus)
        assert ("train.gpus" in {item.name for item in found.left}) is not carried


def test_the_mean_over_tokens_of_verl_is_told_to_have_been_one_of_micro_batches() -> None:
    for words, told in (("", True), (f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", False)):
        differs = convert(f"{VERL} {words}").differs
        assert (
            any("token-mean: up to verl 0.7 a mean over the tokens of each micro-batch" in x for x in differs) is told
        )
    assert not any("token-mean" in x for x in convert(f"{VERL} {ACTOR}.policy_loss.loss_mode=gspo").differs)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--use_vllm true --num_infer_workers 1", ("server", 5, 1)),  # 4 train and 1 generates
        ("--use_vllm true --num_infer_workers 2", ("server", 6, 2)),
        ("--use_vllm true --num_infer_workers 4", ("colocate", 4, None)),  # as many as train
        ("--use_vllm true --tools_prompt react_zh", ("server", 5, 1)),  # its default is 1
        ("--num_infer_workers 1", ("colocate", 4, None)),  # transformers generates there
        ("--use_vllm true", ("colocate", 4, None)),
        ("--use_vllm true --vllm_server_host 10.0.0.2", ("server", 5, 1)),
        ("--use_vllm true --vllm_mode colocate --vllm_server_host 10.0.0.2", ("colocate", 4, None)),
    ],
)
def test_engines_of_ms_swift_have_gpus_of_their_own_where_its_version_gives_them_some(
    words: str, found: tuple[str, int, int | None]
) -> None:
    run = convert(f"{SWIFT} {words}")
    config = run.config
    assert (config.rollout.mode, config.cluster.gpus_per_node, config.rollout.engines_per_node) == found
    told = any("1, an engine on a GPU beside those that train (up to 3.4)" in line for line in run.assumed)
    assert told is (words == "--use_vllm true")


def test_a_share_of_the_rows_is_held_out_where_the_version_is_below_3_6() -> None:
    ratio = convert(f"{SWIFT} --dataset a.jsonl#1000 --num_infer_workers 4").config.data.train_ratio
    assert ratio == 0.99
    for words in ("--split_dataset_ratio 0", "--val_dataset test.jsonl", "--eval_strategy no"):
        given = convert(f"{SWIFT} --dataset a.jsonl#1000 --num_infer_workers 4 {words}").config.data
        assert given.train_ratio == 1.0


def test_a_mini_batch_above_the_rollout_is_one_update_with_dynamic_sizes() -> None:
    """verl refuses it without use_dynamic_bsz only; scripts of 2025 have 256 above 64."""
    sizes = VERL.replace("data.train_batch_size=64", "data.train_batch_size=16")
    with pytest.raises(ValueError, match="must not be above data.train_batch_size"):
        convert(sizes)
    found = convert(f"{sizes} {ACTOR}.use_dynamic_bsz=True {ACTOR}.ppo_max_token_len_per_gpu=8192")
    assert found.config.batch.steps_per_generation == 1
    assert found.config.batch.global_batch_size == 16 * found.config.batch.num_generations
    assert any("verl makes one update of a rollout all the same" in line for line in found.differs)


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        (f"{ACTOR}.fsdp_config.model_dtype=bfloat16", "weights that the optimizer keeps are float32 here"),
        ("reward_model.reward_manager=dapo", "none manages the others"),
        ("reward.custom_reward_function.path=a.py", "point reward.functions at"),
        ("algorithm.kl_ctrl.kl_coef=0.001", "read with use_kl_in_reward only (up to 0.3.0 without use_kl_loss)"),
        ("algorithm.filter_groups._target_=a.B", "names the class of these settings"),
    ],
)
def test_reasons_are_those_of_the_argument(argument: str, why: str) -> None:
    found = convert(f"{VERL} {argument}")
    assert why in {item.name: item.why for item in found.left}[argument.partition("=")[0]]


def test_hydra_looks_for_a_config_beside_the_module(tmp_path: Path) -> None:
    (tmp_path / "recipe" / "own" / "config").mkdir(parents=True)
    (tmp_path / "recipe" / "own" / "config" / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\nalgorithm: {norm_adv_by_std_in_grpo: false}\n"
    )
    run = VERL.replace("verl.trainer.main_ppo", "recipe.own.main_dapo --config-path=config --config-name=mine")
    found = convert(run, "verl", folder=tmp_path, name="run.sh")
    assert not found.config.algorithm.normalize_advantage


@pytest.mark.parametrize("path", ["data/b.parquet", "$HOME/b.parquet", "$DATA/b.parquet", "[a.parquet,b.parquet]"])
def test_no_evaluation_by_steps_is_none_after_the_run_however_the_data_are_named(path: str) -> None:
    found = convert(f"{VERL} trainer.test_freq=-1 data.val_files={path}")
    assert not found.config.eval.after
    assert convert(f"{VERL} trainer.test_freq=-1").config.eval.after  # without data there is none in any case


def test_epochs_end_a_run_of_verl_before_its_steps() -> None:
    run = f"{VERL} trainer.total_training_steps=600 trainer.total_epochs=2"
    assert convert(run, rows=7473).config.run.max_steps == 7473 // 64 * 2 * 2  # two updates of a rollout
    assert convert(run, rows=10**6).config.run.max_steps == 1200
    found = convert(run)
    assert found.config.run.max_steps == 1200
    assert any("also ends after 2 epochs" in line for line in found.assumed)


def test_a_mode_of_generation_that_verl_does_not_have_is_told() -> None:
    assert any("rollout.mode=search: verl has sync and async" in line
               for line in convert(f"{VERL} actor_rollout_ref.rollout.mode=search").assumed)  # fmt: skip
    assert not any("verl has sync" in line for line in convert(f"{VERL} actor_rollout_ref.rollout.mode=async").assumed)


def test_a_script_of_ones_own_with_arguments_of_verl_is_read_if_it_is_said_to_be_verls() -> None:
    run = VERL.replace("python -m verl.trainer.main_ppo", "python scripts/run_grpo_train.py")
    with pytest.raises(ValueError, match="with arguments of verl: --from verl takes it for main_ppo"):
        convert(run)
    assert convert(run, "verl").config.batch.num_generations == 8
    words = "reward.custom_reward_function.path=a/b.py actor_rollout_ref.rollout.n=4"
    with pytest.raises(ValueError, match=r"^(?!.*b\.py is another trainer)"):
        convert(f"./train.sh {words}\n", name="run.sh")


def test_a_key_that_hydra_adds_is_no_typo() -> None:
    found = convert(f"{VERL} +actor_rollout_ref.rollout.model=search actor_rollout_ref.rollout.mode=async")
    assert any("rollout.model=search" in line for line in [*found.dropped, found.text])
    with pytest.raises(ValueError, match="nearest: actor_rollout_ref.rollout.mode"):
        convert(f"{VERL} actor_rollout_ref.rollout.model=search")


def test_a_command_that_eval_is_given_is_read_although_a_part_of_it_is_not_known() -> None:
    found = convert(f'T=$(date +%s)\nCMD="{VERL} trainer.experiment_name=x-${{T}}"\neval $CMD\n', name="run.sh")
    assert found.config.batch.num_generations == 8
    with pytest.raises(ValueError):
        convert(f'CMD="$(cat command.txt) {VERL}"\neval $CMD\n', name="run.sh")


def test_a_size_of_all_gpus_is_not_read_with_dynamic_sizes() -> None:
    size = "actor_rollout_ref.rollout.log_prob_micro_batch_size"
    words = f"{size}=160 {ACTOR}.use_dynamic_bsz=True {ACTOR}.ppo_max_token_len_per_gpu=8192"
    assert "does not read it with use_dynamic_bsz" in why(f"{VERL} {words}")[size]
    assert "give the size per GPU" in why(f"{VERL} {size}=160")[size]


MEAN = "loss_agg_mode token-mean: verl takes so the mean of divergence and entropy"


def test_what_the_means_of_verl_are_is_told_where_they_differ() -> None:
    gspo, kl = f"{VERL} {ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.use_kl_loss=True"
    differs = [" ".join(convert(run).differs) for run in (gspo, f"{gspo} {kl}", f"{gspo} {ACTOR}.entropy_coeff=0.01")]
    assert [MEAN in text for text in differs] == [False, True, True]
    assert MEAN not in " ".join(convert(f"{gspo} {kl} {ACTOR}.loss_agg_mode=seq-mean-token-mean").differs)
    told = " ".join(convert(f"{VERL} {ACTOR}.policy_loss.loss_mode=geo_mean").differs)
    assert "since 0.8 verl adds up the means of the micro-batches" in told


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (f"{TRL} --loss_type grpo --mask_truncated_completions", True),
        (f"{TRL} --loss_type dapo --mask_truncated_completions", False),
        (f"{SWIFT} --overlong_filter true", True),
        (f"{SWIFT} --overlong_filter false", False),
    ],
)
def test_what_a_mean_without_cut_off_completions_divides_by_is_told(run: str, told: bool) -> None:
    found = convert(run)
    assert any("the mean divides by all completions there" in line for line in found.differs) is told


def test_trackers_are_carried_over() -> None:
    found = convert(f"{TRL} --report_to mlflow trackio swanlab neptune")
    ours = found.config.tracking
    assert (ours.mlflow, ours.trackio, ours.swanlab, ours.wandb) == (True, True, "online", "disabled")
    assert any(item.why.startswith("neptune: there are") for item in found.left)
    assert convert(f"{VERL} trainer.logger=[console,swanlab]").config.tracking.swanlab == "online"


def test_settings_of_megatron_that_exist_here_are_carried_over() -> None:
    megatron = f"{ACTOR}.megatron"
    words = (
        f"+{megatron}.override_transformer_config.fp8=hybrid +{megatron}.override_transformer_config.fp8_recipe=mxfp8"
    )
    config = convert(
        f"{VERL} model_engine=megatron {words} +{megatron}.override_ddp_config.overlap_grad_reduce=True"
    ).config
    assert (config.model.fp8, config.model.fp8_recipe, config.parallel.overlap_grad_reduce) == ("hybrid", "mxfp8", True)


def test_a_share_of_memory_that_is_not_known_is_told() -> None:
    found = convert(f"{TRL} --use_vllm --vllm_gpu_memory_utilization $(cat share)")
    assert (
        "known only when the script runs" in {item.name: item.why for item in found.left}["vllm_gpu_memory_utilization"]
    )
