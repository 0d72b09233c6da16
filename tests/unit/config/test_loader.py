"""Reading configs: every mistake is found, told together and with its place; what is written is read back equal."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_hpc.config import paths, plugins
from gspo_hpc.config.changes import MAY_CHANGE, difference, refused_changes
from gspo_hpc.config.loader import ConfigError, dump, from_dict, load
from gspo_hpc.config.reading.config_yaml import Reader
from gspo_hpc.config.schema import (
    Config,
    Container,
    EvalSet,
    RewardFunction,
    RewardModel,
    Source,
    Tool,
    keys,
    limits,
    plain_type,
)
from gspo_hpc.config.section import Count, OneLine

TOOLS = ("sbatch", "srun", "vLLM's", "torch.distributed,")  # names that a sentence may begin with


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def problems(path: Path | None, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    assert str(caught.value) == "\n".join(caught.value.problems)
    assert all("\n" not in line for line in caught.value.problems)
    return caught.value.problems


def test_a_file_with_settings_over_it(tmp_path: Path) -> None:
    text = """
    run: {name: first, max_steps: 10}
    batch:
      global_batch_size: 32
    optimizer:
    data: {train: data/rows.jsonl}
    reward:
      functions:
        - function: number
        - {function: graders/mine.py:grade, weight: 0.5, args: {tolerance: 1.0e-3}}
    rollout: {engine: {max_num_seqs: 4, gpu_memory_utilization: 0.5}}
    """
    overrides = ["run.max_steps=20", "rollout.engine.gpu_memory_utilization=0.8", "optimizer.lr=1e-5", "run.name=007"]
    config = load(write(tmp_path, text), overrides)
    assert (config.run.name, config.run.max_steps, config.batch.global_batch_size) == ("007", 20, 32)
    assert config.optimizer.lr == 1e-5 and config.optimizer.adam_beta1 == 0.9
    assert config.rollout.engine == {"max_num_seqs": 4, "gpu_memory_utilization": 0.8}
    assert config.data.train == "data/rows.jsonl"  # left relative
    assert config.reward.functions == (
        RewardFunction(function="number"),
        RewardFunction(function="graders/mine.py:grade", weight=0.5, args={"tolerance": 1e-3}),
    )


def test_defaults_alone(tmp_path: Path) -> None:
    assert load(None, []) == Config() == from_dict({}) == load(write(tmp_path, ""), [])
    assert load(None, ["run.max_steps=3"]).run.max_steps == 3


def test_numbers_without_a_point_are_numbers(tmp_path: Path) -> None:
    config = load(write(tmp_path, "optimizer: {lr: 1e-6, clip_grad: 1}"), ["optimizer.adam_eps=1e-7"])
    assert yaml.safe_load("1e-6") == "1e-6" != yaml.safe_load("1.5e3")  # the trap: YAML 1.1 wants a point and a sign
    assert (config.optimizer.lr, config.optimizer.adam_eps) == (1e-6, 1e-7)
    assert type(config.optimizer.clip_grad) is float
    engine = load(write(tmp_path, "rollout: {engine: {gpu_memory_utilization: 9e-1}}")).rollout.engine
    assert engine == {"gpu_memory_utilization": 0.9}


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("run.max_steps", "1e3", 1000),
        ("run.max_steps", "1.5e+3", 1500),
        ("run.max_steps", "10.0", 10),
        ("run.max_steps", "1_000", 1000),
        ("run.max_steps", "0x10", 16),
        ("optimizer.lr", "1_000.5", 1000.5),
        ("batch.share_prompts", "no", False),
        ("moe.router_replay", "off", "off"),  # false in YAML 1.1
        ("data.prompt_key", "yes", "yes"),
        ("slurm.comment", "'24:00'", "24:00"),
        ("slurm.environment", "{A: off, B: 'on'}", {"A": "off", "B": "on"}),
        ("slurm.modules", "[no]", ("no",)),
        ("slurm.time_minutes", "90", 90),
        ("slurm.time_minutes", "090", 90),
        ("slurm.time_minutes", "90:00", 90),
        ("slurm.time_minutes", "90:01", 91),  # Slurm rounds up
        ("slurm.time_minutes", "24:00:00", 1440),
        ("slurm.time_minutes", "1-00:00:00", 1440),
        ("slurm.time_minutes", "'1-12'", 36 * 60),
        ("slurm.time_minutes", "1-1:30", 25 * 60 + 30),
        ("slurm.time_minutes", "1-23:00", 47 * 60),
    ],
)
def test_what_is_written_is_what_is_read(tmp_path: Path, key: str, written: str, value: Any) -> None:
    """In a file, on the command line, and in the file of a run."""
    section, name = key.split(".")
    for config in (load(write(tmp_path, f"{section}:\n  {name}: {written}\n")), load(None, [f"{key}={written}"])):
        assert getattr(getattr(config, section), name) == value
        assert type(getattr(getattr(config, section), name)) is type(value)
        assert load(write(tmp_path, dump(config))) == config


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("rollout: {max_response_length: 1:00}", "rollout.max_response_length is 1:00, a number of base 60"),
        ("run: {name: 24:00}", "run.name is 24:00, a number of base 60 in YAML 1.1; put quotes around text"),
        ("run: {name: 0777}", "run.name is 0777, which begins with 0; put quotes around text"),
        ("run: {0777: 1}", "unknown key run.0777"),
        ("rollout: {engine: {max_num_seqs: 0100}}", "rollout.engine.max_num_seqs is 0100, which begins with 0"),
        ("slurm: {sbatch: {a: {b: [1, 1:30]}}}", "slurm.sbatch.a.b[1] is 1:30, a number of base 60"),
        ("reward: {functions: [{function: f, weight: 1:30}]}", "reward.functions[0].weight is 1:30, a number of base"),
        ("tracking: {profile_steps: [1, 1:00]}", "tracking.profile_steps is 1:00, a number of base 60"),
        ("model: {dtype: 16:00}", "model.dtype is 16:00, a number of base 60"),
        ("batch: {share_prompts: 00}", "batch.share_prompts is 00, which begins with 0"),
        ("slurm: 1:00", "slurm is a section of keys; found 1:00"),
    ],
)
def test_values_that_versions_of_yaml_read_differently(tmp_path: Path, line: str, words: str) -> None:
    path = write(tmp_path, f"# config\n{line}\n")
    (found,) = problems(path)
    assert found.startswith(f"{path}:2: ") and words in found


def test_a_value_inside_a_free_form_one_has_its_own_line(tmp_path: Path) -> None:
    path = write(
        tmp_path, "rollout:\n  engine:\n    seed: 1\n    max_num_seqs: 2:00\nslurm:\n  sbatch:\n    qos: 007\n"
    )
    assert [line.split(" is ")[0] for line in problems(path)] == [
        f"{path}:4: rollout.engine.max_num_seqs",
        f"{path}:7: slurm.sbatch.qos",
    ]


def test_items_of_lists_have_their_own_lines(tmp_path: Path) -> None:
    path = write(tmp_path, "reward:\n  functions:\n  - function: a\n    weight: 1\n  - function: b\n    weight: x\n")
    assert problems(path) == (f"{path}:6: reward.functions[1].weight must be a number; found 'x'",)


def test_every_mistake_of_file_and_command_line_at_once(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "run:\n"
        "  max_stepz: 10\n"
        "batsh: {}\n"
        "batch:\n"
        "  global_batch_size: many\n"
        "  share_prompts: 1\n"
        "rollout: {mode: colocated}\n",
    )
    found = problems(path, "optimizer.lr=-1", "model.pth=x", "evaluation.interval=2")
    assert len(found) == 8
    text = "\n".join(found)
    for line in (
        f"{path}:2: unknown key run.max_stepz; nearest: run.max_steps",
        f"{path}:3: unknown section 'batsh'; nearest: batch",
        f"{path}:5: batch.global_batch_size must be a whole number; found 'many'",
        f"{path}:6: batch.share_prompts must be true or false; found 1",
        f"{path}:7: rollout.mode is 'colocated', which is not allowed; nearest: colocate; allowed: colocate, server",
        "command line: optimizer.lr must be 0 or more; found -1",
        "command line: unknown key model.pth; nearest: model.path",
        "command line: unknown section 'evaluation'",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("run.max_steps=true", "must be a whole number; found true"),
        ("run.max_steps=10.5", "must be a whole number; found 10.5"),
        ("run.max_steps=1e10", "must be at most 1000000000; found 10000000000"),
        ("slurm.container={}", "slurm.container.kind and slurm.container.image are missing"),
        ("rollout.max_response_length=16k", "must be a whole number; found '16k'; write 16000 or 16384"),
        ("rollout.kv_cache_gb=1.5KiB", "found '1.5KiB'; it counts GB: write 1.43e-06"),
        ("batch.global_batch_size='1,024'", "found '1,024'; write 1024"),
        ("rollout.max_response_length=90%", "must be a whole number; found '90%'; it is a number, not a share"),
        ("rollout.kv_cache_gb=90%", "must be a number; found '90%'; it is a number, not a share"),
        ("optimizer.lr=90%", "must be a number; found '90%'; it is a number, not a share"),
        ("data.train_ratio=90%", "must be a number; found '90%'; write 0.9"),
        ("slurm.mem=90%", "must be a size as Slurm writes it: 900G, 64000M, or 0 for all of a node; found '90%'"),
        ("slurm.signal_seconds=99999", "must be at most 65535; found 99999"),
        ("rollout.top_p=90%", "must be a number; found '90%'; write 0.9"),
        ("optimizer.lr='1e-6'", "must be a number; found '1e-6'; write 1e-6, without quotes"),
        ("run.max_steps='١٢'", "must be a whole number; found '١٢'; write 12"),
        ("rollout.max_response_length=1:00", "is 1:00, a number of base 60 in YAML 1.1; write 60"),
        (
            "optimizer.lr=-1:30.5",
            "is -1:30.5, a number of base 60 in YAML 1.1; that is -90.5, and it must be at least 0",
        ),
        ("rollout.engine={a: [1:00]}", "rollout.engine.a[0] is 1:00, a number of base 60"),
        ("run.max_steps=0777", "is 0777, which begins with 0; write 777 (511 if it is octal)"),
        ("run.max_steps=08", "is 08, which begins with 0; write 8"),
        ("run.max_steps=1__0", "must be a whole number; found '1__0'"),
        ("batch.share_prompts=y", "must be true or false; found 'y'"),
        (
            "slurm.environment={A: 1:00}",
            "slurm.environment.A is 1:00, a number of base 60 in YAML 1.1",
        ),
        ("run.name=2026-11-23", "must be text; found 2026-11-23 (date); put quotes around it"),
        ("slurm.time_minutes=24h", "must be minutes or a time as Slurm writes it: 90, 90:00, 1:30:00, 1-12, 1-12:30"),
        ("slurm.time_minutes=1:60", "must be minutes or a time as Slurm writes it"),
        ("slurm.time_minutes=1-24", "must be minutes or a time as Slurm writes it"),
        ("slurm.time_minutes=1-29:00", "must be minutes or a time as Slurm writes it"),
        ("slurm.time_minutes=00:00:00", "must be minutes or a time as Slurm writes it"),
        ("slurm.time_minutes=UNLIMITED", "must be minutes or a time as Slurm writes it"),
        ("slurm.time_minutes=0", "must be 1 or more; found 0"),
        ("slurm.time_minutes=1.5", "must be a whole number; found 1.5"),
        ("rollout.engine={a: 1, a: 2}", "the key rollout.engine.a is given twice"),
        ("run.max_steps=0", "must be 1 or more; found 0"),
        ("cluster.nodes=1000000", "must be at most 100000; found 1000000"),
        ("cluster.gpus_per_node=1000000", "must be at most 256; found 1000000"),
        ("rollout.engines_per_node=1000000000000", "must be at most 256; found 1000000000000"),
        ("batch.global_batch_size=99999999999999999999999", "must be at most 1000000000; found 23 digits"),
        ("batch.global_batch_size=10000000000000000", "must be at most 1000000000; found 10000000000000000"),
        ("rollout.max_response_length=2000000000", "must be at most 1000000000; found 2000000000"),
        ("run.seed=null", "must be a whole number; found null"),
        ("run.seed=-1", "must be at least 0"),
        ("run.name=null", "must be text; found null"),
        ("run.name='a\n#SBATCH'", "run.name must be 1 to 100 letters"),
        ("run.name=../x", "run.name must be 1 to 100 letters"),
        ('run.dir="a\\nb"', "without line breaks"),
        ('run.dir="a\\0b"', "without line breaks"),
        ('run.dir=""', "without line breaks"),
        ("optimizer.lr=yes", "must be a number; found true"),
        ("optimizer.lr=.nan", "must be a number; found nan"),
        ("optimizer.lr=nan", "must be a number; found 'nan'"),
        ("optimizer.lr=[1]", "must be a number; found a list"),
        ("optimizer.adam_beta2=1", "below 1"),
        ("rollout.temperature=0", "must be at least 0.01 and at most 2"),
        ("rollout.temperature=2.1", "vLLM accepts no other temperature; found 2.1"),
        ("eval.temperature=0.001", "must be at least 0.01 and at most 2"),
        ("rollout.top_p=1.1", "at most 1"),
        ("rollout.top_k=0", "-1 for all tokens"),
        ("rollout.engine=3", "must be a mapping; found 3"),
        ("rollout.engine={1: 2}", "the key 1; keys must be text"),
        ("rollout.engine={a: .nan}", "finite numbers"),
        ("rollout.engine={a: 2020-01-01}", "rollout.engine.a is 2020-01-01 (date); allowed: text"),
        ("reward.functions=number", "must be a list; found 'number'"),
        ("reward.functions=[number]", "must be a mapping of keys; found 'number'"),
        ("reward.functions=[{weight: 2}]", "reward.functions[0].function is missing"),
        ("reward.functions=[{function: a, wieght: 2}]", "nearest: reward.functions[0].weight"),
        ("reward.functions=[{function: a}, {function: b, weight: x}]", "reward.functions[1].weight must be a number"),
        ("reward.functions.weight=2", "must be a list; found a mapping"),
        ("batch.max_steps=3", "did you mean run.max_steps?"),
        ("batch.zzz=3", "allowed: micro_batch_size"),
        ("tracking.wandb=off", "allowed: auto, online, offline, disabled"),
        ("global_batch_size=8", "is not a setting; write batch.global_batch_size"),
        ("interval=8", "is not a setting; write checkpoint.interval or eval.interval"),
        ("nothing=8", "write section.key=value"),
        ("temprature=1", "is not a setting; write section.key=value; nearest: rollout.temperature or eval.temperature"),
        *(
            (f"{name}=8", "is not a setting; write section.key=value, such")
            for name in ("model", "modell", "loss", "steps")
        ),
        ("batch_size=8", "is not a setting; write section.key=value, such"),
        ("max_step=8", "is not a setting; write section.key=value; nearest: run.max_steps"),
        ("batch.global_batch_size", "write section.key=value"),
        ("batch.=8", "write section.key=value"),
        ("run.max_steps.x=8", "must be a whole number; found a mapping"),
        ("data.train=[", "not valid YAML"),
        ("algorithm.name=PPO", "algorithm.name is 'PPO', and there is no PPO here: it trains a value model beside the"),
        ("algorithm.name=dpo", "is 'dpo', and there is no DPO here: it learns from given pairs of answers"),
        ("algorithm.name=gpso", "algorithm.name is 'gpso', which is not allowed; nearest: gspo; allowed: gspo, cispo"),
        ("algorithm.name=loss", 'algorithms/loss.py has no class with `name: Literal["loss"]`; allowed: gspo'),
        ("algorithm.name=[]", "algorithm.name must be text; found a list"),
        ("algorithm.clip_hi=1", "unknown key algorithm.clip_hi of gspo; nearest: algorithm.clip_high"),
        ("algorithm.zzz=1", "unknown key algorithm.zzz of gspo; allowed: name, clip_low, clip_high, aggregation"),
        ("algorithm.max_steps=1", "unknown key algorithm.max_steps of gspo; did you mean run.max_steps?"),
        ("algorithm.aggregation=tokens", "algorithm.aggregation is 'tokens', which is not allowed; nearest: token"),
    ],
)
def test_wrong_settings(setting: str, words: str) -> None:
    (line,) = problems(None, setting)
    assert line.startswith("command line: ") and words in line


SIXTY = "a number of base 60 in YAML 1.1"


@pytest.mark.parametrize(
    ("setting", "end"),
    [
        ("slurm.sbatch={time-min: 24:00:00}", f"is 24:00:00, {SIXTY}; put quotes around text"),
        ("slurm.sbatch={account: 0777}", "is 0777, which begins with 0; put quotes around text"),
        ("slurm.environment={A: 1:00}", f"is 1:00, {SIXTY}; put quotes around text"),
        ("rollout.engine.max_num_seqs=1:00", f"is 1:00, {SIXTY}; write 60"),
        ("rollout.engine.max_num_seqs=0100", "is 0100, which begins with 0; write 100 (64 if it is octal)"),
        (
            "rollout.engine.max_num_seqs=00",
            "is 00, which begins with 0; that is 0, and it must be a whole number, 1 or more",
        ),
        (
            "rollout.engine.gpu_memory_utilization=1:00",
            f"is 1:00, {SIXTY}; that is 60, and it must be above 0 and at most 1",
        ),
        (
            "rollout.engine.enable_sleep_mode=00",
            "is 00, which begins with 0; that is 0, and it must be true: engines sleep while the trainer works",
        ),
        ("rollout.engine.revision=1:00", f"is 1:00, {SIXTY}; write 60 or put quotes around text"),
        ("reward.functions=[{function: f, args: {a: 1:00}}]", f"is 1:00, {SIXTY}; write 60 or put quotes around text"),
        ("batch.share_prompts=00", "is 00, which begins with 0; must be true or false"),
        ("run.max_steps=1:30.5", f"is 1:30.5, {SIXTY}; that is 90.5, and it must be at least 1 and at most 1000000000"),
        ("run.max_steps=00", "is 00, which begins with 0; that is 0, and it must be at least 1 and at most 1000000000"),
        ("slurm.signal_seconds=0177777", "is 0177777, which begins with 0; write 65535"),
    ],
)
def test_only_what_a_key_takes_is_proposed(setting: str, end: str) -> None:
    """Slurm reads text by itself: 24:00:00 is a day to it, and 86400 two months."""
    (line,) = problems(None, setting)
    assert line.endswith(f" {end}"), line


def test_a_mistake_has_the_place_where_its_value_was_given(tmp_path: Path) -> None:
    """A value of the command line is not blamed on the line of the file that it replaces, and a profile has its own."""
    (tmp_path / "site.yaml").write_text("slurm:\n  partition: gpu\n  time_minutes: 0\n")
    path = write(tmp_path, f"run:\n  max_steps: 5\nslurm:\n  profile: {tmp_path}/site.yaml\n")
    assert problems(path, "run.max_steps=ten") == (
        "command line: run.max_steps must be a whole number; found 'ten'",
        f"{tmp_path}/site.yaml:3: slurm.time_minutes must be 1 or more; found 0",
    )


def test_a_run_overrides_its_profile(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("slurm: {partition: gpu, time_minutes: 240, account: abc}\n")
    path = write(tmp_path, f"slurm: {{profile: {tmp_path}/site.yaml, partition: fast}}\n")
    found = load(path, ["slurm.time_minutes=5"]).slurm
    assert (found.partition, found.time_minutes, found.account, found.profile) == ("fast", 5, "abc", None)


def test_null_only_where_none_is_allowed() -> None:
    raw = {"rollout": {"engines_per_node": None}, "run": {"dir": None}, "batch": None}
    assert from_dict(raw) == Config() == load(None, ["run.dir=", "rollout.engines_per_node=null"])
    with pytest.raises(ConfigError, match="rollout.max_prompt_length must be a whole number; found null"):
        from_dict({"rollout": {"max_prompt_length": None}})


def test_a_key_given_twice_is_a_mistake(tmp_path: Path) -> None:
    path = write(tmp_path, "run:\n  seed: 1\n  name: a\n  seed: 2\nbatch: {}\nrun: {}\n")
    assert problems(path) == (
        f"{path}:4: run.seed is given twice (first on line 2)",
        f"{path}:6: run is given twice (first on line 1)",
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- 1\n- 2\n", "a config is made of sections"),
        ("run: [1, 2]\n", "run is a section of keys; found a list"),
        ("run:\n  seed: [1\nx: 2\n", ":3: not valid YAML"),
        ("run: 2020-99-99\n", "not valid YAML"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("run: !!python/object/apply:os.system ['false']\n", "not valid YAML"),
        ("? [1, 2]\n: 3\n", "not valid YAML"),
        ("1: {}\n", "unknown section 1"),
        ("run: {1: 2}\n", "unknown key run.1"),
        ("run: \x00\n", "not valid YAML"),
        ("rollout: &a\n  engine: {x: *a}\n", "unknown key|nested too deeply"),
        ("rollout: {engine: " + "[" * 990 + "]" * 990 + "}\n", "nested too deeply"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=words) as caught:
        load(path, [])
    assert str(path) in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path, "")
    assert problems(tmp_path / "runs.yaml") == (
        f"{tmp_path}/runs.yaml: no such config file; nearest: {tmp_path}/run.yaml",
    )
    assert "cannot be read" in problems(tmp_path)[0]
    (tmp_path / "latin.yaml").write_bytes(b"run: {name: \xff}")
    assert "not UTF-8" in problems(tmp_path / "latin.yaml")[0]


def test_a_merge_key_and_an_alias_share_settings(tmp_path: Path) -> None:
    functions = "[{function: f, args: {<<: *e, b: 3}}, {function: g, args: *e}]"
    text = f"rollout: {{engine: &e {{a: 1, b: 2}}}}\nreward: {{functions: {functions}}}\n"
    config = load(write(tmp_path, text), ["rollout.engine.a=9"])
    assert config.rollout.engine == {"a": 9, "b": 2}
    assert config.reward.functions[0].args == {"a": 1, "b": 3}
    assert config.reward.functions[1].args == {"a": 1, "b": 2}  # the override did not reach through the alias


def test_min_lr_is_not_above_lr() -> None:
    with pytest.raises(ConfigError, match="min_lr .* must not be above optimizer.lr"):
        from_dict({"optimizer": {"lr": 1e-6, "min_lr": 1e-5}})


def test_min_lr_may_be_lr_and_nothing_above() -> None:
    assert load(None, ["optimizer.lr=1e-5", "optimizer.min_lr=1e-5"]).optimizer.min_lr == 1e-5
    found = problems(None, "optimizer.lr=1e-5", "optimizer.min_lr=1.1e-5")
    assert found == ("command line: optimizer.min_lr (1.1e-05) must not be above optimizer.lr (1e-05)",)


def test_there_are_two_sleep_levels() -> None:
    assert load(None, ["rollout.sleep_level=2"]).rollout.sleep_level == 2
    for wrong in (0, 3):
        with pytest.raises(ConfigError, match=f"rollout.sleep_level must be 1 .* or 2 .*; found {wrong}"):
            load(None, [f"rollout.sleep_level={wrong}"])


def test_the_table_of_changes_names_real_keys() -> None:
    free = {"rollout.engine.gpu_memory_utilization"}
    free |= {f"reward.models[].{name}" for name in RewardModel.model_fields}
    assert {f"{key.split('.')[0]}" for key in keys()} >= {key.split(".")[0] for key in MAY_CHANGE}
    assert keys().keys() >= {key for key in MAY_CHANGE if not key.endswith(".*")} - free


def test_every_key_has_a_meaning_and_every_number_a_range() -> None:
    inner = {f"reward.functions.{name}": field for name, field in RewardFunction.model_fields.items()}
    inner |= {f"reward.models.{name}": field for name, field in RewardModel.model_fields.items()}
    inner |= {f"environment.tools.{name}": field for name, field in Tool.model_fields.items()}
    inner |= {f"data.sources.{name}": field for name, field in Source.model_fields.items()}
    inner |= {f"data.eval_sets.{name}": field for name, field in EvalSet.model_fields.items()}
    inner |= {f"slurm.container.{name}": field for name, field in Container.model_fields.items()}
    for name, field in (keys() | inner).items():
        text = field.description or ""
        assert text[:1].isupper() or text.split()[0] in TOOLS, f"{name}: {text}"
        assert text.endswith("."), f"{name}: {text}"
        kind = plain_type(field.annotation)
        if kind is int:
            assert {"ge", "le"} <= limits(field).keys() or {"ge", "lt"} <= limits(field).keys(), name
        if kind is float:
            assert limits(field) or name == "reward.functions.weight", name


# ---- written and read back -----------------------------------------------------------------------

words = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Cn", "Co"]), max_size=12)
numbers = st.floats(allow_nan=False, allow_infinity=False)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)


rows: dict[str, st.SearchStrategy[Any]] = {
    "columns": st.dictionaries(words, st.none() | words.filter(bool), max_size=3),
    "constants": st.dictionaries(words, plain, max_size=3),
    "filter": st.dictionaries(words, words | numbers | st.lists(words | numbers, min_size=1), max_size=3)
    | st.dictionaries(words, st.just({"min": 1, "max": 2.5})),
    "tokens": st.lists(numbers, min_size=2, max_size=2),
    "rewards": st.dictionaries(words, numbers, min_size=1, max_size=3),
}
sources = st.fixed_dictionaries({"files": words}, optional={"eval": words, "weight": st.floats(1e-12, 1e12), **rows})
of_set = {"samples": st.integers(1, 10**9), "temperature": st.floats(0.01, 2), "top_p": st.floats(1e-12, 1)}
sets = st.fixed_dictionaries({"files": words}, optional={"top_k": st.sampled_from([-1, 5]), **of_set, **rows})


def quoted(text: str) -> str:
    return f"x{text}x"


@st.composite
def raw_configs(draw: st.DrawFn) -> dict[str, dict[str, Any]]:
    """Values of the right type for some keys; most are in range."""
    raw: dict[str, dict[str, Any]] = {}
    for key, field in keys().items():
        if not draw(st.integers(0, 5)) and key not in ("run.name", "run.dir"):  # these two have rules of their own
            base = plain_type(field.annotation)
            section, name = key.split(".")
            if key == "algorithm.name":
                value: Any = draw(st.sampled_from(["gspo", "gspo_token", "grpo"]))
            elif key == "slurm.mem":
                value = draw(st.from_regex("[0-9]{1,4}[KMGT]?", fullmatch=True))
            elif key == "slurm.signal_seconds":
                value = draw(st.integers(1, 65535))
            elif typing.get_origin(base) is typing.Literal:
                value = draw(st.sampled_from(typing.get_args(base)))
            elif base is Container:
                value = {"kind": "pyxis", "image": "x"}
            elif base == dict[str, str]:
                value = draw(st.dictionaries(words, words, max_size=3))
            elif base in (tuple[str, ...], tuple[OneLine, ...]):
                value = draw(st.lists(st.from_regex("[a-z]{1,5}", fullmatch=True), max_size=3))
            elif key == "sandbox.url":
                value = draw(st.sampled_from(["http://host:8080", "https://host/place"]))
            elif key == "sandbox.readable":
                value = draw(st.lists(st.sampled_from(["/opt/lib", "/cvmfs/soft ware"]), max_size=2))
            elif key == "notify.urls":
                value = draw(st.lists(st.sampled_from(["env:NOTES", "file:~/notes"]), max_size=3))
            elif base == tuple[Count, ...]:
                value = draw(st.lists(st.integers(1, 10**9), max_size=3))
            elif typing.get_origin(next(iter(typing.get_args(base)), None)) is typing.Literal:
                value = draw(st.lists(st.sampled_from(typing.get_args(typing.get_args(base)[0])), max_size=3))
            elif typing.get_origin(base) is dict:
                value = draw(st.dictionaries(words, plain, max_size=3))
            elif key == "environment.tools":
                value = [{"function": "calculator", "parameters": draw(st.dictionaries(words, plain))}]
            elif key in ("data.sources", "data.eval_sets"):
                kind = sources if key == "data.sources" else sets
                value = [draw(kind) | {"name": f"s{place}"} for place in range(draw(st.integers(0, 3)))]
            elif key == "reward.models":
                more = {"dtype": "bfloat16", "chat_template_kwargs": draw(st.dictionaries(words, plain, max_size=3))}
                value = [{"name": "m", "path": draw(words)} | more]
            elif typing.get_origin(base) is tuple:
                value = [{"function": "number", "weight": draw(numbers), "args": draw(st.dictionaries(words, plain))}]
            else:
                kinds: dict[Any, st.SearchStrategy[Any]] = {
                    bool: st.booleans(),
                    int: st.integers(1, 256 if section in ("cluster", "rollout") else 10**9),
                    float: st.floats(1e-12, 0.99),
                    str: st.from_regex("[a-z]{1,5}", fullmatch=True) if section == "slurm" else words.map(quoted),
                }
                value = draw(kinds[base])
            raw.setdefault(section, {})[name] = value
    raw.get("optimizer", {}).pop("min_lr", None)
    if "sleep_level" in raw.get("rollout", {}):
        raw["rollout"]["sleep_level"] = 2
    for section in ("rollout", "eval"):
        if "temperature" in raw.get(section, {}):
            raw[section]["temperature"] = 0.01 + raw[section]["temperature"]
    if "oversampling_factor" in raw.get("rollout", {}):
        raw["rollout"]["oversampling_factor"] += 1.0
    if "initial_loss_scale" in raw.get("optimizer", {}):
        raw["optimizer"]["initial_loss_scale"] += 1.0
    return raw


@settings(max_examples=50, deadline=None)
@given(raw_configs())
def test_what_is_dumped_is_loaded_equal(raw: dict[str, dict[str, Any]]) -> None:
    config = from_dict(raw)
    again = from_dict(yaml.load(dump(config), Loader=Reader))
    assert again == config == from_dict(yaml.safe_load(dump(config)))
    assert difference(config, again) == []
    assert {row[0].split(".")[0] for row in difference(Config(), config)} <= raw.keys()


def test_dump_is_resolved_and_loads_from_a_file(tmp_path: Path) -> None:
    config = from_dict({"run": {"name": "no"}, "optimizer": {"lr": 1e-6}, "reward": {"functions": [{"function": "a"}]}})
    text = dump(config)
    assert load(write(tmp_path, text), []) == config
    raw = yaml.safe_load(text)
    assert list(raw) == [*Config.model_fields]
    assert raw["rollout"]["max_response_length"] == 1024 and raw["run"]["dir"] is None


# ---- differences between attempts ----------------------------------------------------------------


def test_difference_names_key_old_and_new() -> None:
    old = from_dict({"run": {"seed": 1}, "rollout": {"engine": {"a": 1, "b": {"c": True}}}})
    new = from_dict({"run": {"seed": 2}, "rollout": {"engine": {"a": 1.0, "b": {"c": 1}, "d": "x", "e": None}}})
    assert difference(old, new) == [
        ("run.seed", 1, 2),
        ("rollout.engine.a", 1, 1.0),
        ("rollout.engine.b.c", True, 1),
        ("rollout.engine.d", "(not given)", "x"),  # and e, whose null is vLLM's own default, is as if not given
    ]
    one = from_dict({"reward": {"functions": [{"function": "a"}]}})
    (row,) = difference(Config(), one)
    assert row[0] == "reward.functions" and row[2][0]["function"] == "a"


def test_lists_of_numbers() -> None:
    assert load(None, ["tracking.profile_steps=[3, 10]"]).tracking.profile_steps == (3, 10)
    with pytest.raises(ConfigError, match=r"profile_steps must be a whole number; found 'x'"):
        load(None, ["tracking.profile_steps=[x]"])
    with pytest.raises(ConfigError, match="profile_steps must be 1 or more; found 0"):
        load(None, ["tracking.profile_steps=[0]"])


def test_what_may_change_between_attempts() -> None:
    old = from_dict({})
    allowed = {
        "run": {"max_steps": 20},
        "cluster": {"nodes": 2},
        "batch": {"micro_batch_size": 2},
        "checkpoint": {"interval": 1},
        "tracking": {"wandb": "disabled"},
        "faults": {"max_skipped_steps": 0},
        "eval": {"interval": 3},
        "rollout": {"sleep_level": 1, "engine": {"gpu_memory_utilization": 0.5}},
        "moe": {"token_dispatcher": "flex"},
    }
    assert len(difference(old, from_dict(allowed))) == 10
    assert refused_changes(old, from_dict(allowed)) == []
    refused: dict[str, dict[str, Any]] = {
        "run": {"seed": 1, "name": "b"},
        "model": {"path": "m"},
        "batch": {"global_batch_size": 2, "num_generations": 2, "share_prompts": False},
        "optimizer": {"lr": 1e-5},
        "rollout": {"temperature": 0.5, "engine": {"seed": 1}},
        "algorithm": {"name": "grpo"},
        "eval": {"samples": 2},
    }
    keys = [f"{section}.{key}" for section, values in refused.items() for key in values]
    expected = {key if key != "rollout.engine" else "rollout.engine.seed" for key in keys}
    expected |= {"algorithm.clip_low", "algorithm.clip_high", "algorithm.ratio"}  # grpo has others
    assert {row[0] for row in refused_changes(old, from_dict(refused))} == expected
    assert not expected & MAY_CHANGE


@pytest.mark.parametrize(("style", "allowed"), [("constant", True), ("linear", False), ("cosine", False)])
def test_more_steps_only_while_the_rate_is_constant(style: str, allowed: bool) -> None:
    raw: dict[str, Any] = {"optimizer": {"lr_decay_style": style}, "run": {"max_steps": 10}}
    longer = raw | {"run": {"max_steps": 20}}
    found = refused_changes(from_dict(raw), from_dict(longer))
    assert found == ([] if allowed else [("run.max_steps", 10, 20)])


def test_an_algorithm_is_known_by_its_name_in_quotes_of_either_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "ALGORITHMS", tmp_path)
    for name, quote in (("double", '"'), ("single", "'")):
        (tmp_path / f"{name}.py").write_text(
            f"class A:\n    name: Literal[{quote}{name}{quote}] = {quote}{name}{quote}\n"
        )
    (tmp_path / "helper.py").write_text("x = 1\n")
    assert [plugins._defines(name) for name in ("double", "single", "helper")] == [True, True, False]
