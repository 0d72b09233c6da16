"""Differences that readers of conversions of people's own scripts and YAMLs for TRL found (seconds)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gspo_hpc.importers.convert import Converted, convert

YAML = "model_name_or_path: a/b\nnum_generations: 2\nper_device_train_batch_size: 2\nmax_steps: 100\nbeta: 0.1\n"


def of(words: str, more: str = "", folder: Path = Path(), **files: str) -> Converted:
    """Return what a command with a YAML of its own amounts to, beside files of these names."""
    (folder / "run.yaml").write_text(YAML + more)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return convert(f"{words} --config run.yaml\n", folder=folder, name="run.sh")


def told(lines: tuple[str, ...], word: str) -> list[str]:
    return [line for line in lines if word in line]


@pytest.mark.parametrize(
    ("launcher", "gpus", "left"),
    [
        ("accelerate launch --num_processes 4 grpo.py", 4, "run.yaml: num_processes=7: the launcher decides"),
        ("accelerate launch --config_file acc.yaml grpo.py", 2, "num_processes 2 of acc.yaml"),
        ("accelerate launch --config_file acc.yaml --num_processes 4 grpo.py", 4, "--num_processes 4"),
        ("torchrun --nproc_per_node 4 grpo.py", 4, "--nproc_per_node 4"),
        ("accelerate launch grpo.py", 7, ""),
        ("python grpo.py", 7, ""),
    ],
)
def test_the_launcher_goes_before_what_the_yaml_says_of_it(tmp_path: Path, launcher: str, gpus: int, left: str) -> None:
    """TRL's parser throws num_processes of its YAML away, or refuses it: only recipes' own launchers read it."""
    found = of(launcher, "num_processes: 7\n", tmp_path, acc__yaml="num_processes: 2\ndistributed_type: MULTI_GPU\n")
    assert found.config.cluster.gpus_per_node == gpus
    assert found.config.batch.global_batch_size == 2 * gpus
    assert bool(told(found.dropped, "num_processes=7")) is bool(left)
    assert not left or told(found.dropped, left)
    assert not left or "num_processes" not in {one.name for one in found.carried if "=7" in one.given}


TRL = "accelerate launch --num_processes 2 grpo.py --num_generations 2 --per_device_train_batch_size 2 --max_steps 9"
PYTHON = """from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer
model = AutoModelForCausalLM.from_pretrained("a/b", torch_dtype=torch.bfloat16, {loaded})
{more}
args = GRPOConfig(num_generations=2, per_device_train_batch_size=2, max_steps=9, {given})
GRPOTrainer(model=model, reward_funcs=f, args=args, train_dataset=d, {trainer}).train()
"""


def python(given: str = "", more: str = "", loaded: str = "", trainer: str = "", pin: str = "") -> Converted:
    text = f"{pin}\n{PYTHON}" if pin else PYTHON
    return convert(text.format(given=given, more=more, loaded=loaded, trainer=trainer), gpus=2, name="run.py")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("", "temperature, top_p, repetition_penalty, min_p, being"),
        ("--temperature 0.7 --top_k 50", ": top_p, repetition_penalty, top_k, min_p, being"),
        ("# trl==0.24.0", "temperature, top_p"),
        ("# trl==0.26.1", "temperature, top_p"),
        ("# trl==0.26.2", ""),
        ("# trl>=0.26.2", ""),
        ("# trl==0.27.0", ""),
        ("--multi_objective_aggregation sum_then_normalize", ""),  # since 0.27
        ("--use_vllm", ""),
        ("--temperature 0.7 --top_p 0.9 --repetition_penalty 1.1 --min_p 0.1", ""),
    ],
)
def test_sampling_of_the_models_own_file_is_told_where_transformers_generates(words: str, named: str) -> None:
    """PR 4647 of TRL: transformers takes a value that is its default for one that is not given."""
    text = f"{words}\n{TRL}" if words.startswith("#") else f"{TRL} {words}"
    lines = told(convert(text).differs, "TRL up to 0.26.1 without vLLM")
    assert [named in line for line in lines] == ([True] if named else [])


@pytest.mark.parametrize(
    ("pin", "words", "is_told"),
    [
        ("# trl==0.15.2", "", True),
        ("# trl==0.14.0", "--temperature 0.6", True),
        ("# trl==0.15.2", "--temperature 1.0", False),
        ("# trl==0.16.0", "--temperature 0.6", False),
        ("", "--temperature 0.6", True),
        ("", "--temperature 0.6 --epsilon 0.2", False),  # since 0.16
    ],
)
def test_log_probs_of_trl_0_15_are_of_temperature_1(pin: str, words: str, is_told: bool) -> None:
    assert bool(told(convert(f"{pin}\n{TRL} {words}").differs, "TRL up to 0.15 computes log-probs at")) is is_told


@pytest.mark.parametrize(
    ("pin", "cut", "comment"),
    [
        ("# trl==0.25.0", True, "as TRL up to 0.25 truncates"),
        ("# trl>=0.25", True, "0.26 and 0.27 cut no prompt"),
        ("# trl==0.26.2", False, "TRL 0.26 and 0.27 cut no prompt by it"),
    ],
)
def test_prompts_are_cut_up_to_trl_0_25(pin: str, cut: bool, comment: str) -> None:
    found = convert(f"{pin}\n{TRL} --max_prompt_length 64")
    assert (found.config.data.overlong == "truncate_left") is cut
    text = " ".join(re.sub(r"\n *#", " ", found.text).split())
    assert comment in text
    assert ("cut no prompt" in text) is (pin != "# trl==0.25.0")


def test_max_prompt_length_ends_with_trl_0_27() -> None:
    found = convert(f"{TRL} --max_prompt_length 64 --use_vllm --epsilon 0.2")
    assert found.config.rollout.mode == "server"  # the default of vllm_mode from 0.16 to 0.29
    assert told(found.assumed, "max_prompt_length is an argument of TRL up to 0.27: defaults of that version are taken")
    assert convert(f"{TRL} --use_vllm --epsilon 0.2").config.rollout.mode == "colocate"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pyproject.toml", '[project]\ndependencies = ["torch", "trl (==0.15.0)", "peft"]\n'),
        ("pyproject.toml", '[project]\ndependencies = ["trl[vllm] (>=0.15.0,<0.16.0)"]\n'),
        ("pyproject.toml", '[tool.poetry.dependencies]\ntrl = "^0.15.2"\n'),
        ("pyproject.toml", '[tool.poetry.dependencies]\ntrl = ">=0.15,<0.16"\n'),
        ("requirements.txt", "torch==2.5\ntrl==0.15.0\n"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_pins_of_poetry_and_of_powershell_are_read(tmp_path: Path, name: str, text: str, encoding: str) -> None:
    (tmp_path / name).write_text(text, encoding=encoding)
    found = convert(f"{TRL}\n", folder=tmp_path, name="run.sh")
    assert found.config.algorithm.aggregation == "sequence" and found.config.rollout.temperature == 0.9
    assert told(found.assumed, f"in {name}: defaults of that version are taken") and not told(found.assumed, "(=")


FOLDER = 'model = PeftModel.from_pretrained(model, "adapters"{})'
BITS = "quantization_config=bnb"


@pytest.mark.parametrize(
    ("pin", "loaded", "is_told"),
    [
        ("# trl==0.25.0", BITS, False),
        ("# trl==0.26.0", BITS, True),
        ("", BITS, True),
        ("", "load_in_4bit=True", True),
        ("", "", False),
    ],
)
def test_adapters_on_quantized_weights_are_bfloat16_since_trl_0_26(pin: str, loaded: str, is_told: bool) -> None:
    found = python(trainer="peft_config=LoraConfig(r=8)", loaded=loaded, pin=pin)
    assert bool(told(found.differs, "adapters on quantized weights into bfloat16")) is is_told
    assert not told(python(loaded=loaded, pin=pin).differs, "adapters on quantized weights")


@pytest.mark.parametrize(
    ("given", "adapters", "loaded", "dtype", "folder"),
    [
        ("", "", "", True, ""),
        ("", "", BITS, False, ""),
        ("", FOLDER.format(""), "", False, "peft freezes the adapters of a folder without is_trainable=True"),
        ("", FOLDER.format(", is_trainable=True"), "", False, "it is trained with the adapters of a folder there"),
        ("", FOLDER.format(", is_trainable=False"), "", False, "peft freezes the adapters of a folder"),
        ("", FOLDER.format(", **more"), "", False, "it is trained with the adapters of a folder there"),
    ],
)
def test_weights_that_are_not_trained_are_not_told_to_be(
    given: str, adapters: str, loaded: str, dtype: bool, folder: str
) -> None:
    found = python(given, adapters, loaded)
    assert bool(told(found.assumed, "weights loaded as bfloat16")) is dtype
    assert bool(told(found.dropped, "of a folder")) is bool(folder)
    assert not folder or told(found.dropped, folder)


@pytest.mark.parametrize(
    ("pin", "beta", "first", "second"),
    [
        ("", "0.1", True, True),
        ("# trl==0.26.2", "0.1", True, False),
        ("# trl==0.27.0", "0.1", False, True),
        ("", "0.0", False, False),
    ],
)
def test_the_reference_beside_adapters_of_a_folder_is_told_by_version(
    pin: str, beta: str, first: bool, second: bool
) -> None:
    found = python(f"beta={beta}", FOLDER.format(", is_trainable=True"), pin=pin)
    lines = told(found.differs, "the reference of the divergence is")
    assert bool(told(tuple(lines), "the model without adapters (TRL up to 0.26)")) is first
    assert bool(told(tuple(lines), "a copy of the adapters (since 0.27)")) is second


STEPS = "eval_strategy: steps\neval_steps: 25\n"
SCRIPT = """from trl import GRPOConfig, GRPOTrainer, TrlParser
args, more = TrlParser((GRPOConfig, Other)).parse_args_and_config()
trainer = GRPOTrainer(model="a/b", reward_funcs=f, args=args, train_dataset=d)
trainer.train()
{}
"""
ASKS = "if args.do_eval:\n    metrics = trainer.evaluate()"


@pytest.mark.parametrize(
    ("more", "script", "after", "comment"),
    [
        (STEPS, "", False, "only at its own steps, unless the last is one of them A run"),
        (f"{STEPS}do_eval: true\n", ASKS, True, "the script evaluates once more after the run"),
        (STEPS, ASKS, True, "the script evaluates once more after the run"),  # do_eval is true with eval_strategy
        ("do_eval: true\n", ASKS, True, "the script evaluates once more after the run"),
        ("", ASKS, None, ""),
        ("", "trainer.evaluate()", True, "the script evaluates once more after the run"),
        (STEPS, "if x:\n    trainer.evaluate()", False, "is known only when it runs"),
        (STEPS, "def later():\n    trainer.evaluate()", False, "unless the last is one of them A run"),
        (STEPS, None, False, "scripts of open-r1 do so after the run, too"),
        ("do_eval: true\n", None, None, ""),
    ],
)
def test_evaluations_after_the_run_are_those_of_the_script(
    tmp_path: Path, more: str, script: str | None, after: bool | None, comment: str
) -> None:
    files = {} if script is None else {"grpo__py": SCRIPT.format(script)}
    found = of("accelerate launch --num_processes 2 grpo.py", more, tmp_path, **files)
    text = " ".join(re.sub(r"\n *#", " ", found.text).split())
    assert ("eval.after" in text or "after:" in text) is (after is not None)
    assert found.config.eval.after is (after is not False) and found.config.eval.before is (after is None)
    assert comment.removesuffix(" A run") in text
    assert not comment.endswith("A run") or "open-r1" not in text
    assert bool(told(found.differs, "here it is greedy")) is (after is not None)
    assert ("reward.functions, data.eval" in text) is (more.startswith(STEPS))
    assert not told(found.dropped, "set eval.interval instead")


@pytest.mark.parametrize("words", ["trl grpo", "python -m trl.scripts.grpo"])
def test_trls_own_script_only_trains_and_had_no_use_for_dtype(tmp_path: Path, words: str) -> None:
    assert "open-r1" not in of(words, STEPS, tmp_path).text
    for pin, is_told in (("# trl==0.25.0", True), ("# trl==0.26.0", False), ("", True)):
        found = of(f"{pin}\n{words}", "dtype: bfloat16\n", tmp_path)
        assert bool(told(found.differs, "hands dtype to no model")) is is_told
    assert not told(of("accelerate launch grpo.py", "dtype: bfloat16\n", tmp_path).differs, "hands dtype to no")


HANDS = """from trl import GRPOConfig, GRPOTrainer, ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_peft_config
{before}
def main(args, model_args):
    {first}
    GRPOTrainer(model={model}, reward_funcs=f, args=args, train_dataset=d{more}).train()
args, model_args = TrlParser((GRPOConfig, ModelConfig)).parse_args_and_config()
main(args, model_args)
"""
PATH = "model_args.model_name_or_path"
OTHER = (
    'def warm_up():\n    SFTTrainer(model="a/b", args=SFTConfig(model_init_kwargs={"dtype": torch.bfloat16})).train()\n'
)


@pytest.mark.parametrize(
    ("script", "dtype", "peft"),
    [
        ({}, False, False),
        ({"before": OTHER}, False, False),
        ({"more": ", peft_config=get_peft_config(model_args)"}, False, True),
        ({"more": ", **more"}, True, True),
        ({"model": "load(model_args)"}, True, True),
        ({"first": "look(model_args)", "before": "def look(own):\n    other(own)\n"}, True, True),
        ({"first": "look(model_args)", "before": "def look(own):\n    print(own)\n"}, False, False),
        ({"first": "args.model_init_kwargs = dict(x=1)"}, True, False),
        ({"model": f"Some.from_pretrained({PATH}, torch_dtype=model_args.dtype)"}, True, False),
        ({"before": "more = LoraConfig(r=4)\n"}, False, True),
    ],
)
def test_a_precision_and_adapters_that_the_script_hands_to_no_model_have_no_effect(
    tmp_path: Path, script: dict[str, str], dtype: bool, peft: bool
) -> None:
    text = HANDS.format(**({"before": "", "first": "pass", "model": PATH, "more": ""} | script))
    more = "dtype: bfloat16\nuse_peft: true\nlora_r: 4\n"
    found = of("accelerate launch --num_processes 2 grpo.py", more, tmp_path, grpo__py=text)
    assert (not told(found.dropped, "dtype=bfloat16: the script hands it to no model, and")) is dtype
    assert (found.config.adapter.type == "lora") is peft
    assert bool(told(found.dropped, "the script makes no adapters of it")) is (not peft)
    assert bool(told(found.assumed, "weights loaded as bfloat16")) is (dtype and not peft)
    assert bool(told(found.differs, "weights are in float32 there")) is (not dtype)


MAIN = "from train.pipeline import main\n\nif __name__ == '__main__':\n    main()\n"


@pytest.mark.parametrize(
    ("command", "more", "reads"),
    [
        ("poetry run accelerate launch --num_processes 3 main.py", "", True),
        ("accelerate launch --num_processes 3 main.py", "rloo_k: 2\n", False),
        ("accelerate launch --num_processes 3 evaluate.py", "", False),
    ],
)
def test_the_yaml_of_a_script_decides_as_it_does_by_itself(
    tmp_path: Path, command: str, more: str, reads: bool
) -> None:
    files = {"main__py": MAIN, "evaluate__py": MAIN}
    if not reads:
        with pytest.raises(ValueError):
            of(command, more, tmp_path, **files)
        return
    found = of(command, more, tmp_path, **files)
    assert found.config.batch.global_batch_size == 6
    assert told(found.assumed, "main.py makes no GRPOConfig that is read: its YAML shows the run")


@pytest.mark.parametrize(("pin", "refused"), [("trl==0.15.0", False), ("trl==0.18.2", False), ("trl==0.19.0", True)])
@pytest.mark.parametrize("alone", [True, False])
def test_a_misspelt_argument_that_trl_throws_away_is_told(tmp_path: Path, pin: str, refused: bool, alone: bool) -> None:
    """The parser refuses what it does not know in a YAML since 0.19."""
    (tmp_path / "requirements.txt").write_text(f"{pin}\n")
    text = f"{YAML}eval_step: 5\n"

    def run() -> Converted:
        if alone:
            return convert(text, folder=tmp_path, name="grpo.yaml", gpus=2)
        return of("accelerate launch --num_processes 2 grpo.py", "eval_step: 5\n", tmp_path)

    if refused:
        with pytest.raises(ValueError, match="unknown argument eval_step; nearest: eval_steps"):
            run()
        return
    found = run()
    assert told(found.assumed, "eval_step=5: it may be a misspelt eval_steps; TRL up to 0.18 ignores what it does not")
    assert [one.name for one in found.strange] == ["eval_step"]
    with pytest.raises(ValueError, match="unknown argument eval_step"):  # of the command, which is refused there, too
        convert(f"# {pin}\n{TRL} --eval_step 5")


CLASS = """from trl import GRPOConfig, GRPOTrainer
class Mine({base}):
{body}
Mine("a/b", f, GRPOConfig(num_generations=2, max_steps=9, per_device_train_batch_size=2), d).train()
"""


def method(name: str) -> str:
    return f"    def {name}(self, *given):\n        pass\n"


@pytest.mark.parametrize(
    ("names", "base", "refused"),
    [
        (["_log_step"], "GRPOTrainer", ""),
        (["_log_loss", "_advantages_of"], "GRPOTrainer", ""),
        (["_log_step", "_generate_and_score_completions"], "GRPOTrainer", "overrides _generate_and_score_completions"),
        (["_prepare_inputs", "compute_loss"], "GRPOTrainer", "overrides compute_loss"),
        (["training_step"], "GRPOTrainer", "overrides training_step"),
        (["_my_loss"], "GRPOTrainer, Mixin", "overrides _my_loss"),
    ],
)
def test_methods_that_trls_trainer_has_decide_and_the_most_telling_is_named(
    names: list[str], base: str, refused: str
) -> None:
    text = CLASS.format(base=base, body="".join(map(method, names)))
    if refused:
        with pytest.raises(ValueError, match=refused):
            convert(text, name="run.py", gpus=1)
        return
    assert told(convert(text, name="run.py", gpus=1).dropped, f"class Mine: {', '.join(names)}")


STEPWISE = """from trl import GRPOConfig, GRPOTrainer
def main(args):
    kw = {made}
{changes}
    config = GRPOConfig(**kw)
{later}
    GRPOTrainer("a/b", f, config, d).train()
main(parse())
"""
MADE = "dict(num_generations=2, max_steps=9, per_device_train_batch_size=2, learning_rate=1e-6, beta=args.beta)"


@pytest.mark.parametrize(
    ("changes", "rate", "unsure"),
    [
        ("", 1e-6, {"beta"}),
        ("kw.update(learning_rate=2e-6, beta=0.1)", 2e-6, set()),
        ("kw['learning_rate'] = 3e-6", 3e-6, {"beta"}),
        ("kw.update({'learning_rate': 3e-6})\n    del kw['beta']", 3e-6, set()),
        ("kw.pop('beta', None)\n    print(kw)\n    x = len(kw)", 1e-6, set()),
        (
            "if args.fast:\n        kw.update(use_vllm=True, learning_rate=4e-6)",
            1e-6,
            {"beta", "use_vllm", "learning_rate"},
        ),
        ("if args.fast:\n        kw.update(learning_rate=1e-6)", 1e-6, {"beta"}),
        ("if args.fast:\n        kw['learning_rate'] = 4e-6\n    kw['learning_rate'] = 5e-6", 5e-6, {"beta"}),
        ("for x in d:\n        kw['learning_rate'] = x", 1e-6, {"beta", "learning_rate"}),
    ],
)
@pytest.mark.parametrize(
    "made", [MADE, MADE.replace("dict(", "{'").replace(")", "}").replace("=", "': ").replace(", ", ", '")]
)
def test_a_mapping_that_is_made_and_changed_in_one_function_is_read(
    changes: str, rate: float, unsure: set[str], made: str
) -> None:
    text = STEPWISE.format(made=made, changes=f"    {changes}", later="    kw['learning_rate'] = 9")
    found = convert(text, name="run.py", gpus=1)
    assert found.config.run.max_steps == 9 and found.config.optimizer.lr == rate
    assert {one.partition("=")[0] for one in found.open} == unsure


@pytest.mark.parametrize(
    "changes",
    ["change(kw)", "kw.update(args.more)", "kw = dict(kw)", "kw[args.name] = 1", "self.kw = kw", "kw.clear()"],
)
def test_a_mapping_that_other_code_may_change_is_not_read(changes: str) -> None:
    text = STEPWISE.format(made=MADE, changes=f"    {changes}", later="")
    with pytest.raises(ValueError, match="arguments of its GRPOConfig are not read there"):
        convert(text, name="run.py", gpus=1)


OWN = """
from dataclasses import dataclass, field
from transformers import HfArgumentParser
from trl import GRPOConfig, GRPOTrainer
{before}
@dataclass
class Own:
    model_name: str = field(default="own/default")
    use_lora: bool = field(default=True)
    weight: float = 0.3
{body}
def main():
    parser = HfArgumentParser((Own, GRPOConfig))
    own, args = parser.parse_args_into_dataclasses()
    {first}
    args.beta = own.weight
    GRPOTrainer(model=own.model_name, reward_funcs=f, args=args, train_dataset=d).train()
main()
"""


def own_fields(folder: Path, words: str, first: str = "pass", before: str = "", body: str = "") -> Converted:
    (folder / "train.py").write_text(OWN.format(first=first, before=before, body=body))
    given = "--num_generations 2 --per_device_train_batch_size 2 --max_steps 9"
    return convert(f"accelerate launch --num_processes 2 train.py {given} {words}", folder=folder, name="run.sh")


def test_fields_of_a_scripts_own_dataclasses_are_no_misspelt_arguments(tmp_path: Path) -> None:
    """`--use_lora` was refused as a misspelt use_dora, and the model was known only when the script runs."""
    found = own_fields(tmp_path, "--use_lora True --model_name a/b --weight 0.2")
    assert (found.config.model.path, found.config.algorithm.kl_beta, found.strange, found.open) == ("a/b", 0.2, (), ())
    why = {item.name: item.why for item in found.left}
    assert why["use_lora=True"] == "an argument of train.py itself, and what that does with it is not read"
    assert why["model_name=a/b"] == "an argument of train.py itself, which hands it on as model_name_or_path"
    found = own_fields(tmp_path, "")
    assert (found.config.model.path, found.config.algorithm.kl_beta) == ("own/default", 0.3)
    with pytest.raises(ValueError, match="unknown argument use_lorb; nearest: use_dora|unknown argument bete"):
        own_fields(tmp_path, "--bete 0.1")


@pytest.mark.parametrize(
    "more",
    [
        {"first": "own.model_name = pick()"},
        {"first": "change(own)", "before": "from other import change"},
        {"first": "change(own)", "before": "from other import far\ndef change(one):\n    far(one)\n"},
        {"first": "vars(own)['model_name'] = pick()"},
        {"first": "own = pick() or own"},
        {"body": "    def __post_init__(self):\n        self.model_name = pick(self.model_name)\n"},
    ],
)
def test_a_field_that_the_script_may_change_is_not_known(tmp_path: Path, more: dict[str, str]) -> None:
    found = own_fields(tmp_path, "--use_lora True --model_name a/b", **more)
    assert found.config.model.path != "a/b"
    assert any(one.startswith("model_name_or_path=") for one in found.open)


@pytest.mark.parametrize(
    "start",
    [
        "accelerate launch --num_processes 2 -m {}",
        "accelerate launch --num_processes 2 --module {}",
        "torchrun --nproc_per_node 2 -m {}",
        "python -m torch.distributed.run --nproc_per_node 2 -m {}",
    ],
)
@pytest.mark.parametrize("file", ["own/train/run.py", "own/train/run/__main__.py", ""])
def test_a_module_behind_m_is_its_file(tmp_path: Path, start: str, file: str) -> None:
    """No run was recognised, also with --from trl; where the file is not at hand, the arguments decide."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "scripts").mkdir()
    if file:
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(OWN.format(first="args.epsilon = 0.3", before="", body=""))
    given = "--num_generations 2 --per_device_train_batch_size 2 --max_steps 9 --scale_rewards none"
    text = f"{start.format('own.train.run')} {given}\n"
    for source in (None, "trl"):
        found = convert(text, source, folder=tmp_path / "scripts", name="run.sh")
        assert found.config.batch.global_batch_size == 2 * 2
        assert found.config.algorithm.clip_low == (0.3 if file else 0.2)
        assert bool(told(found.assumed, "own/train/run.py is not at hand")) is (not file)


@pytest.mark.parametrize(
    "words", ["python -m pip install --no_deps x", "python -m own.prepare --out a", "srun -m block x"]
)
def test_a_module_that_is_no_run_is_none(tmp_path: Path, words: str) -> None:
    text = f"{words}\naccelerate launch --num_processes 2 grpo.py --num_generations 2 --max_steps 9\n"
    text += "  --per_device_train_batch_size 2\n"
    for source in (None, "trl"):
        assert convert(text.replace("9\n ", "9 "), source, folder=tmp_path, name="run.sh").config.run.max_steps == 9
