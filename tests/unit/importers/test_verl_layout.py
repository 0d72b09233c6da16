"""Engines, reference and transformer settings of verl: their counterparts here, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_hpc.importers.convert import convert

ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
TRANSFORMER = f"{ACTOR}.megatron.override_transformer_config"
ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
RUN = (
    "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64 "
    f"{ACTOR}.ppo_mini_batch_size=32 actor_rollout_ref.rollout.n=8"
)
MEGATRON = f"{RUN} model_engine=megatron {ACTOR}.megatron.tensor_model_parallel_size=2"


def test_the_engine_decides_whose_defaults_and_arguments_count() -> None:
    fsdp, megatron = convert(f"{RUN} model_engine=dp"), convert(f"{RUN} model_engine=megatron")
    assert fsdp.config.memory.recompute_granularity == "full"  # gradient checkpointing is its default
    assert megatron.config.memory.recompute_granularity is None or megatron.config.memory != fsdp.config.memory
    assert "model_engine" in {item.name for item in megatron.carried}
    assert convert(f"X=megatron\n{RUN} model_engine=${{X}}").config == megatron.config
    chosen = convert(f"{RUN} actor@actor_rollout_ref.actor=megatron_actor ref@actor_rollout_ref.ref=megatron_ref")
    assert chosen.config == megatron.config and chosen.strange == ()
    veomni = convert(f"{RUN} model_engine=veomni {ACTOR}.veomni.ulysses_parallel_size=2")
    assert veomni.config.parallel.context_parallel_size == 2
    for engine in ("mindspeed", "torchtitan"):
        with pytest.raises(ValueError, match=rf"model_engine={engine}: dp \(FSDP\), megatron and veomni"):
            convert(f"{RUN} model_engine={engine}")
    with pytest.raises(ValueError, match=r"model_engine=\$E: \$E is not set in the script"):
        convert(f"{RUN} model_engine=$E")


def test_a_reference_with_another_layout_is_told_and_one_with_the_same_carried_over() -> None:
    same = convert(f"{MEGATRON} {REF}.megatron.tensor_model_parallel_size=2 {REF}.megatron.context_parallel_size=1")
    assert {f"{REF}.megatron.tensor_model_parallel_size", f"{REF}.megatron.context_parallel_size"} <= {
        item.name for item in same.carried
    }
    other = convert(f"{MEGATRON} {REF}.megatron.tensor_model_parallel_size=4 {REF}.megatron.param_offload=True")
    line = f"{REF}.megatron.tensor_model_parallel_size=4: the actor has 2, and the reference model shares"
    assert any(text.startswith(line) for text in other.differs) and other.config.parallel == same.config.parallel
    assert f"{REF}.megatron.tensor_model_parallel_size" in {item.name for item in other.left}


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        (f"+{TRANSFORMER}.moe_token_dispatcher_type=flex", "moe.token_dispatcher", "flex"),
        (f"+{TRANSFORMER}.moe_token_dispatcher_type='\"flex\"'", "moe.token_dispatcher", "flex"),
        (f"+{TRANSFORMER}.moe_token_dispatcher_type=alltoall", "moe.token_dispatcher", "alltoall"),
        (f"+{TRANSFORMER}.moe_enable_deepep=True", "moe.token_dispatcher", "flex"),
        (
            f"+{TRANSFORMER}.num_layers_in_first_pipeline_stage=13",
            "parallel.num_layers_in_first_pipeline_stage",
            13,
        ),
        (f"+{TRANSFORMER}.num_layers_in_last_pipeline_stage=11", "parallel.num_layers_in_last_pipeline_stage", 11),
        (f"{ACTOR}.megatron.dtype=float16", "model.dtype", "float16"),
        (f"+{TRANSFORMER}.fp16=True", "model.dtype", "float16"),
        (f"{ACTOR}.megatron.dtype=bfloat16", "model.dtype", "bfloat16"),
        ("actor_rollout_ref.rollout.dtype=bfloat16", "model.dtype", "bfloat16"),
    ],
)
def test_settings_of_the_layers_arrive_at_their_key(given: str, key: str, value: str) -> None:
    found = convert(f"{MEGATRON} {given}")
    section, name = key.split(".")
    assert getattr(getattr(found.config, section), name) == value
    argument = given.lstrip("+").partition("=")[0]
    assert key in {item.name: item.keys for item in found.carried}[argument]


def test_engines_of_another_type_than_the_trainer_are_told() -> None:
    found = convert(f"{MEGATRON} actor_rollout_ref.rollout.dtype=float16")
    assert (
        "which is the trainer's bfloat16"
        in {item.name: item.why for item in found.left}["actor_rollout_ref.rollout.dtype"]
    )
    both = convert(f"{MEGATRON} {ACTOR}.megatron.dtype=float16 actor_rollout_ref.rollout.dtype=float16")
    assert both.config.model.dtype == "float16" and not any(item.name.endswith("dtype") for item in both.left)


DAPO = RUN.replace("verl.trainer.main_ppo", "recipe.dapo.main_dapo")


def test_the_dapo_recipe_trains_on_what_it_generates_where_it_filters_nothing() -> None:
    found = convert(f"{DAPO} data.gen_batch_size=192")
    assert found.config.batch.steps_per_generation == 6 and any("gen_batch_size 192" in line for line in found.differs)
    filtered = convert(f"{DAPO} data.gen_batch_size=192 algorithm.filter_groups.enable=True")
    assert filtered.config.batch.steps_per_generation == 2
    with pytest.raises(ValueError, match=r"data.gen_batch_size=192: without algorithm.filter_groups it is the size"):
        convert(f"{RUN} data.gen_batch_size=192")
    assert convert(f"{RUN} data.gen_batch_size=64").config == convert(RUN).config


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("actor@actor_rollout_ref.actor=mlite_actor", "it chooses a file of settings that is not verl's own"),
        ("+experiment=large", "experiment=large: it chooses a file of settings"),
        ("distillation.enabled=True", "distillation.enabled=True: the teacher is missing"),
        ("actor_rollout_ref.actor.optim.optimizer=Muon", "there is only AdamW here"),
        ("actor_rollout_ref.rollout.nnodes=2", "engines have nodes of their own there"),
        ("algorithm.adv_estimator=$E", "algorithm.adv_estimator=$E: $E is not set in the script"),
        (f"{ACTOR}.policy_loss.loss_mode=kl_cov", "loss_mode=kl_cov is another objective"),
        (f"{ACTOR}.megatron.tensor_model_parallel_sise=2", f"nearest: {ACTOR}.megatron.tensor_model_parallel_size"),
    ],
)
def test_what_changes_the_run_and_has_no_counterpart_is_refused(given: str, expected: str) -> None:
    with pytest.raises(ValueError) as refused:
        convert(f"{RUN} {given}")
    assert expected in str(refused.value)


def test_names_of_other_engines_are_no_misspelt_ones() -> None:
    found = convert(f"{RUN} {ACTOR}.veomni.param_offload=True {ACTOR}.other.param_offload=True +hydra.run.dir=x")
    assert f"{ACTOR}.other.param_offload" in {item.name for item in found.strange}


def test_the_file_that_hydras_flags_name_is_read(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "mine.yaml").write_text(
        "defaults:\n  - ppo_trainer\n  - _self_\ndata:\n  train_batch_size: 128\n  max_prompt_length: 700\n"
    )
    flags = "--config-path=$(pwd)/config --config-name=mine"
    found = convert(f"{RUN} {flags}", folder=tmp_path, name="run.sh")
    assert found.config.rollout.max_prompt_length == 700 and found.config.batch.steps_per_generation == 2
    assert found.config.batch.global_batch_size == 256
    with pytest.raises(ValueError, match="that file sets arguments of the run, and is not at hand"):
        convert(f"{RUN} --config-name=other", folder=tmp_path, name="run.sh")
    (tmp_path / "config" / "odd.yaml").write_text("defaults:\n  - strange_base\n")
    with pytest.raises(ValueError, match="it is made from strange_base"):
        convert(f"{RUN} --config-path config --config-name odd", folder=tmp_path, name="run.sh")


HYDRA = """
defaults: [ppo_trainer, _self_, {override hydra/job_logging: disabled}%s]
algorithm: {adv_estimator: grpo}
data: {train_batch_size: 64, max_prompt_length: "${oc.env:MPL,256}", max_response_length: "${oc.env:MRL}"}
actor_rollout_ref:
  rollout: {n: 8}
  actor: {ppo_mini_batch_size: "${data.train_batch_size}"}
trainer: {experiment_name: "x-${data.train_batch_size}", n_gpus_per_node: "${a.b}"}
"""


def test_a_key_that_names_another_has_its_value_after_the_overrides(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    file = tmp_path / "config" / "own.yaml"
    file.write_text(HYDRA % "")
    run = "python -m verl.trainer.main_ppo --config-path=config --config-name=own data.train_batch_size=128"
    found = convert(run, folder=tmp_path)
    config = found.config
    assert config.batch.global_batch_size == 128 * 8 and config.run.name == "x-128"
    assert config.rollout.max_prompt_length == 256
    left = {item.name: item.why for item in found.left}
    assert "it refers to oc.env:MRL, which is not given" in left["data.max_response_length"]
    assert "it refers to a.b, which is not given" in left["trainer.n_gpus_per_node"]
    found = convert(f"export MRL=77\n{run} 'data.max_prompt_length=${{data.max_response_length}}'", folder=tmp_path)
    assert (found.config.rollout.max_response_length, found.config.rollout.max_prompt_length) == (77, 77)
    assert convert(HYDRA % "").config.batch.global_batch_size == 64 * 8
    file.write_text(HYDRA % ", {actor@actor_rollout_ref.actor: megatron_actor}, {data@data: legacy_data}")
    found = convert(run, folder=tmp_path)
    assert "actor@actor_rollout_ref.actor" in {item.name for item in found.carried}
    for group in ("{model: qwen}", "{actor@actor_rollout_ref.actor: mine}"):
        file.write_text(HYDRA % f", {group}")
        with pytest.raises(ValueError, match="it chooses a file of settings that is not verl's own"):
            convert(run, folder=tmp_path)


@pytest.mark.parametrize(
    ("defaults", "expected"),
    [
        ("[mine, _self_]", "it is made from mine, and only verl's"),
        ("[_self_, ppo_trainer]", "_self_ stands before ppo_trainer, whose values then replace those of the file"),
    ],
)
def test_a_yaml_of_hydra_that_others_make_up_is_refused(defaults: str, expected: str, tmp_path: Path) -> None:
    text = f"defaults: {defaults}\nalgorithm: {{adv_estimator: grpo}}\nactor_rollout_ref: {{rollout: {{n: 8}}}}\n"
    with pytest.raises(ValueError, match=expected):
        convert(text)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "own.yaml").write_text(text)
    with pytest.raises(ValueError, match=expected):
        convert("python -m verl.trainer.main_ppo --config-path=config --config-name=own", folder=tmp_path)


@pytest.mark.parametrize(
    ("run", "given", "kernels"),
    [
        *(
            (MEGATRON, f"{TRANSFORMER}.attention_backend={kind}", kind)
            for kind in ("auto", "flash", "fused", "unfused")
        ),
        (MEGATRON, f"{TRANSFORMER}.attention_backend=local", None),
        (MEGATRON, f"{TRANSFORMER}={{attention_backend:fused}}", "fused"),
        (RUN, f"{ATTENTION}=flash_attention_2", "flash"),
        (RUN, f"{ATTENTION}=flash_attention_3", "flash"),
        (RUN, f"{ATTENTION}=eager", "unfused"),
        (RUN, f"{ATTENTION}=sdpa", None),
        (MEGATRON, f"{ATTENTION}=eager", None),
    ],
)
def test_the_kernels_of_attention_are_carried_over(run: str, given: str, kernels: str | None) -> None:
    found = convert(f"{run} +{given}")
    assert found.config.model.attention_backend == (kernels or "auto")
    carried = [item for item in found.carried if "model.attention_backend" in item.keys]
    told = [item for item in found.left if item.name.rpartition(".")[2] in ("attention_backend", "attn_implementation")]
    assert (len(carried), len(told)) == ((1, 0) if kernels else (0, 1))
    assert all("attention_backend" in item.why for item in told)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("actor_rollout_ref: {actor: {frobnicate: 7}}", "actor_rollout_ref.actor.frobnicate=7"),
        ("trainer: {whatever: 3}", "trainer.whatever=3"),
    ],
)
def test_an_unknown_argument_is_told_with_the_yaml_that_gives_it(tmp_path: Path, given: str, told: str) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "own.yaml").write_text(f"defaults: [ppo_trainer, _self_]\n{given}\n")
    run = f"{RUN} --config-path=config --config-name=own"
    found = convert(run, folder=tmp_path, name="run.sh")
    assert [item.given for item in found.strange] == [f"config/own.yaml: {told}"]
    assert any(line.startswith(f"config/own.yaml: {told} is no known argument") for line in found.assumed)
    name, _, value = told.partition("=")
    overridden = convert(f"{run} {name}={value}", folder=tmp_path, name="run.sh")  # by the command itself
    assert [item.given for item in overridden.strange] == [told]


def test_a_mistake_in_the_yaml_that_hydra_reads_is_told_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    run = f"{RUN} --config-path=config --config-name=own"
    for given in ("actor_rollout_ref.actor.ppo_epochs: x", "actor_rollout_ref.actor.optim.lr: -1"):
        (tmp_path / "config" / "own.yaml").write_text(f"defaults: [ppo_trainer, _self_]\n{given}\n")
        with pytest.raises(ValueError, match=rf"^config/own\.yaml: {given.partition(':')[0]}="):
            convert(run, folder=tmp_path, name="run.sh")


def test_an_optimizer_on_the_cpu_waits_in_host_memory() -> None:
    name = f"{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload"
    for given, wanted in (("True", True), ("False", False)):
        found = convert(f"{MEGATRON} +{name}={given}")
        assert found.config.memory.offload_optimizer == wanted


@pytest.mark.parametrize(
    ("param", "optimizer", "moved"),
    [
        (True, False, ("weights", "gradients")),  # of FSDP, whose gradients go with the weights
        (False, True, ("optimizer",)),
        (True, True, ("weights", "gradients", "optimizer")),
    ],
)
def test_what_fsdp_moves_to_host_memory_is_moved_here(param: bool, optimizer: bool, moved: tuple[str, ...]) -> None:
    found = convert(
        f"{RUN} model_engine=dp {ACTOR}.fsdp_config.param_offload={param} "
        f"{ACTOR}.fsdp_config.optimizer_offload={optimizer}"
    )
    assert found.config.memory.offload_trainer and set(found.config.memory.offload_parts) == set(moved)


@pytest.mark.parametrize(
    ("words", "moved"),
    [
        ("param_offload=True", ("weights", "gradients")),
        ("optimizer_offload=True", ("optimizer",)),
        ("param_offload=True optimizer_offload=True", ("weights", "gradients", "optimizer")),
    ],
)
def test_what_veomni_moves_to_host_memory_is_moved_here_as_fsdps_is(words: str, moved: tuple[str, ...]) -> None:
    given = " ".join(f"{ACTOR}.veomni.{word}" for word in words.split())
    found = convert(f"{RUN} model_engine=veomni {given}")
    assert found.config.memory.offload_trainer is True and found.config.memory.offload_parts == moved
    assert not any(".veomni." in item.name for item in found.left)
    other = convert(f"{RUN} model_engine=dp {given}")
    assert other.config.memory.offload_trainer is None
    assert {item.why for item in other.left if ".veomni." in item.name} == {"verl does not read it with this engine"}


@pytest.mark.parametrize(("engine", "name"), [("dp", "eps"), ("megatron", "adam_eps")])
def test_what_overrides_the_optimizer_says_so_of_the_optimizer(engine: str, name: str) -> None:
    override = f"{ACTOR}.optim.override_optimizer_config"
    found = convert(f"{RUN} model_engine={engine} +{override}.{name}=1e-6 +{override}.use_nesterov=True")
    assert found.config.optimizer.adam_eps == 1e-6
    why = {item.name: item.why for item in found.left}[f"{override}.use_nesterov"]
    assert why == "it is not passed on; optimizer.* and memory.* configure the optimizer here"
