"""What cannot be converted, and that sizes come out as the other project computes them."""

from __future__ import annotations

import re
import shlex
import subprocess

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gspo_hpc.config.loader import from_dict
from gspo_hpc.importers import tables
from gspo_hpc.importers.convert import convert
from gspo_hpc.importers.inputs import options
from gspo_hpc.importers.scripts.shell import read_script
from gspo_hpc.importers.typos import misspelt
from gspo_hpc.planning.plan import make_plan

SWIFT = "megatron rlhf --rlhf_type grpo --global_batch_size 32 --num_generations 4 --train_iters 10"
ACTOR = "actor_rollout_ref.actor"
VERL = "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 data.train_batch_size=64 "
VERL += f"{ACTOR}.ppo_mini_batch_size=32"
TRL = "trl grpo --num_generations 8 --per_device_train_batch_size 8 --max_steps 10"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # typos
        (
            f"{SWIFT} --tensor_model_parallel_sise 2",
            "argument --tensor_model_parallel_sise; nearest: --tensor_model_pa",
        ),
        (f"{SWIFT} --vllm_mode colocat", "--vllm_mode colocat: must be one of colocate, server; nearest: colocate"),
        (f"{SWIFT} --importance_sampling_level sequense", "nearest: sequence"),
        (
            f"{VERL} {ACTOR}.ppo_minibatch_size=8",
            f"argument {ACTOR}.ppo_minibatch_size; nearest: {ACTOR}.ppo_mini_batch_size",
        ),
        (f"{VERL} actor_rolout_ref.actor.ppo_epochs=8", f"nearest: {ACTOR}.ppo_epochs"),
        (f"{VERL} data.train_batchsize=8", "nearest: data.train_batch_size"),
        (f"{TRL} --num_generation 8", "unknown argument num_generation; nearest: num_generations"),
        # impossible values
        (f"{SWIFT} --micro_batch_size two", "--micro_batch_size two: must be a whole number"),
        (f"{SWIFT} --micro_batch_size 0", "--micro_batch_size 0: must be 1 or more"),
        (f"{SWIFT} --micro_batch_size", "--micro_batch_size: must be a whole number"),
        (f"{SWIFT} --micro_batch_size 1 2", "--micro_batch_size 1 2: must be one value"),
        (f"{SWIFT} --num_generations 1", "--num_generations 1: must be 2 or more"),
        (f"{SWIFT} --epsilon -0.1", "--epsilon -0.1: must be 0 or more"),
        (f"{SWIFT} --lr fast", "--lr fast: must be a number"),
        (f"{SWIFT} --lr nan", "--lr nan: must be a number"),
        (f"{SWIFT} --lr 1e-6 --min_lr 1e-5", "must not be above"),
        (f"{SWIFT} --top_p 1.5", "--top_p 1.5: must be above 0 and at most 1; found 1.5 (rollout.top_p)"),
        (f"{SWIFT} --sequence_parallel perhaps", "--sequence_parallel perhaps: must be true or false"),
        (f"{SWIFT} --vllm_gpu_memory_utilization 70", "must be above 0 and at most 1"),
        (
            f"{SWIFT} --vllm_max_model_len 512 --max_completion_length 1024",
            "must be above the longest completion (1024)",
        ),
        (f"{SWIFT} --stop_words <|im_end|> --lr 1e-6", "< leads to no file: put quotes around text with < > | & ;"),
        (f"NPROC_PER_NODE=eight {SWIFT}", "NPROC_PER_NODE=eight: must be a whole number, 1 or more"),
        (f"{VERL} {ACTOR}.ppo_mini_batch_size=128", "must not be above data.train_batch_size (64): both count prompts"),
        (f"{VERL} actor_rollout_ref.rollout.n=1", "must be 2 or more, since one completion has no group"),
        (f"{VERL} trainer.nnodes=1.5", "trainer.nnodes=1.5: must be a whole number"),
        (f"{VERL} data.truncation=up", "data.truncation=up: must be one of error, left, right, middle"),
        (
            f"python -m verl.trainer.main_ppo {VERL} nonsense",
            "'nonsense' is no override of verl: write name.of.key=value",
        ),
        (
            f"{TRL} --steps_per_generation 3 --gradient_accumulation_steps 2",
            "no whole updates of gradient_accumulation_steps",
        ),
        (f"{TRL} --steps_per_generation 2 --generation_batch_size 64", "exclude each other"),
        (
            f"{TRL} --generation_batch_size 12",
            "must be divisible by per_device_train_batch_size (8) x processes (1) = 8",
        ),
        (
            f"accelerate launch --num_processes 6 --num_machines 4 grpo.py {TRL[9:]}",
            "must be divisible by num_machines (4)",
        ),
        # other algorithms, and other programs
        (f"{SWIFT} --loss_type fipo", "loss_type fipo is another objective: here are a mean over"),
        (f"{SWIFT} --loss_type luspo", "loss_type luspo: Megatron-SWIFT has no loss_type of this name; nearest: sapo"),
        (
            f"{SWIFT} --loss_type dr_grop",
            "loss_type dr_grop: Megatron-SWIFT has no loss_type of this name; nearest: dr_grpo",
        ),
        (
            f"{SWIFT} --loss_type mean",
            "no loss_type of this name; Megatron-SWIFT has grpo, bnpo, dr_grpo, dapo, cispo, sapo, real",
        ),
        (f"{SWIFT} --loss_type $LOSS", "loss_type $LOSS chooses the objective: $LOSS is not set"),
        (f"{TRL} --loss_type real", "loss_type real: TRL has no loss_type of this name"),
        (
            f"{SWIFT} --loss_type dr_grpo --importance_sampling_level sequence",
            "loss_type dr_grpo with importance_sampling_level sequence: a ratio per sequence has the mean over "
            "sequences here (loss_type grpo); dr_grpo needs importance_sampling_level token",
        ),
        (
            f"{TRL} --loss_type cispo --importance_sampling_level sequence_token --epsilon_high 5",
            "loss_type cispo with importance_sampling_level sequence_token: a ratio per sequence has the mean",
        ),
        (
            f"{SWIFT} --advantage_estimator rloo --scale_rewards batch",
            "--advantage_estimator rloo with scale_rewards batch: the reward minus the mean of the others is divided",
        ),
        (f"{SWIFT} --advantage_estimator gae", "--advantage_estimator gae: must be one of grpo, rloo, reinforce"),
        (f"{SWIFT} --delta 0.9", "--delta 0.9: must be above 1: it bounds ratios"),
        (f"{SWIFT} --optimizer muon", "--optimizer muon: there is only adam here"),
        (f"{SWIFT} --scale_rewards mean", "must be group, batch, none or gdpo: what advantages are divided by"),
        (f"{TRL} --scale_rewards gdpo", "must be group, batch or none: what advantages are divided by"),
        (f"{SWIFT} --loss_type cispo --epsilon_high 0.3", "it bounds weights of 1, and must be above 1"),
        (SWIFT.replace("grpo", "dpo"), "--rlhf_type dpo: only --rlhf_type grpo has a counterpart here"),
        ("swift rlhf --rlhf_type grpo", "no argument of ms-swift that says how to train is in it"),
        ("swift sft --model m", "swift sft is no reinforcement learning: convert reads swift rlhf"),
        (VERL.replace("=grpo", "=gae"), "algorithm.adv_estimator=gae: convert reads runs with the advantages"),
        (VERL.replace("algorithm.adv_estimator=grpo", ""), "algorithm.adv_estimator is not given (its default is gae)"),
        (f"{VERL} {ACTOR}.policy_loss.loss_mode=clip_cov", "loss_mode=clip_cov is another objective"),
        (f"{VERL} {ACTOR}.loss_agg_mode=seq-mean-token-sum", "loss_agg_mode=seq-mean-token-sum is another objective"),
        (f"{VERL} algorithm.use_kl_in_reward=True {ACTOR}.use_kl_loss=True", "here the KL term is in one of them"),
        (
            f"{VERL} algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive",
            "kl_ctrl.type=adaptive: the weight",
        ),
        (f"{VERL} algorithm.use_kl_in_reward=True algorithm.kl_penalty=full", "estimators of a KL term are kl, k1"),
        (f"{VERL} --{ACTOR}.optim.lr=5e-6", "Hydra takes no dashes before an override, and ends: leave them out"),
        (f"{TRL} --loss_type vespo", "loss_type vespo is another objective"),
        (f"{TRL} --optim adafactor", "optim adafactor: there is only AdamW here"),
        # what is no run at all
        ("", "it is empty"),
        ("ls -l\n", "no run of ms-swift, verl or TRL is recognised"),
        ("run: {seed: 1}\nbatch: {num_generations: 8}\n", "it is a config of gspo_hpc already"),
        ("compute_environment: LOCAL_MACHINE\nnum_processes: 8\n", "this is accelerate's config"),
        ("a: [1\nb: 2\n", "line 2: not valid YAML"),
        ("megatron rlhf --model 'a", "a quote (') is opened and never closed"),
        (f"{SWIFT}\n{SWIFT}\n", "it starts 2 runs: leave one in the file"),
    ],
)
def test_mistakes_end_in_a_line_that_helps(text: str, expected: str) -> None:
    with pytest.raises(ValueError) as refused:
        convert(text)
    assert expected in str(refused.value)
    assert len(str(refused.value).splitlines()) <= 2


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ValueError) as refused:
        convert(f"{SWIFT} --lrr 1 --micro_batchsize 1 --epsilon x --loss_type real")
    assert [line.split(":")[0].split(";")[0] for line in str(refused.value).splitlines()] == [
        "--epsilon x",
        "loss_type real is another objective",
        "unknown argument --micro_batchsize",
    ]  # --lrr is like nothing that is known closely enough


@pytest.mark.parametrize(
    ("base", "known", "word"),
    [
        (SWIFT, tables.load("swift").known, " --{} 7"),
        (VERL, tables.load("verl").known, " {}=7"),
        (TRL, tables.load("trl").known - {"config"}, " --{} 7"),
    ],
    ids=["swift", "verl", "trl"],
)
def test_no_argument_is_lost_without_a_word(base: str, known: frozenset[str], word: str) -> None:
    plain = convert(base)
    for name in sorted(known):
        if name in base:
            continue
        try:
            found = convert(base + word.format(name))
        except ValueError as refused:
            assert name in str(refused), name
            continue
        assert found.config != plain.config or name in found.text, name


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("tensor_model_parallel_sise", "tensor_model_parallel_size"),
        ("micro_batchsize", "micro_batch_size"),
        ("num_generation", "num_generations"),
        ("lr_decya_style", "lr_decay_style"),
        ("actor.optim.weight_dekay", "actor.optim.weight_decay"),
        ("aktor.optim.weight_decay", "actor.optim.weight_decay"),
        # other arguments, not misspelt ones
        ("min_response_length", None),
        ("adam_beta3", None),
        ("fp4_format", None),
        ("lr", None),
        ("max_token_len", None),
        ("actor.veomni.weight_decay", None),
        ("rollout.optim.weight_decay", None),
        ("weight_decay", None),
    ],
)
def test_only_what_is_near_is_called_nearest(name: str, nearest: str | None) -> None:
    known = {"tensor_model_parallel_size", "micro_batch_size", "num_generations", "lr_decay_style", "fp8_format", "l2"}
    known |= {"max_response_length", "adam_beta1", "adam_beta2", "actor.optim.weight_decay", "max_seq_len"}
    assert misspelt(name, known) == nearest


PROJECTS = {
    "swift": (SWIFT, sorted(tables.load("swift").known), " --{} {}"),
    "verl": (VERL, sorted(tables.load("verl").known), " {}={}"),
    "trl": (TRL, sorted(tables.load("trl").known - {"config"}), " --{} {}"),
}
VALUES = [
    "7",
    "0",
    "-1",
    "1e-6",
    "nan",
    "1e400",
    "null",
    "False",
    "[1,2]",
    "[",
    "{a: 1}",
    "",
    "$X",
    "a b",
    "a\nb: 1 # c",
]


@given(st.sampled_from(sorted(PROJECTS)), st.data())
@settings(max_examples=80, deadline=None)
def test_anything_is_converted_or_refused_and_reads_back(source: str, data: st.DataObject) -> None:
    text, known, word = PROJECTS[source]
    for _ in range(data.draw(st.integers(0, 4))):
        name = known[data.draw(st.integers(0, len(known) - 1))]
        text += word.format(name, shlex.quote(data.draw(st.sampled_from(VALUES) | st.text(max_size=6))))
    try:
        found = convert(text, gpus=data.draw(st.none() | st.integers(1, 20)), rows=data.draw(st.none() | st.just(500)))
    except ValueError as refused:
        assert str(refused)
        return
    assert from_dict(yaml.safe_load(found.text)) == found.config


def test_clip_ratio_of_verl_is_read_where_its_two_sides_are_empty() -> None:
    plain = convert(f"{VERL} {ACTOR}.clip_ratio=0.3")
    assert (plain.config.algorithm.clip_low, plain.config.algorithm.clip_high) == (0.2, 0.2)
    assert any(item.startswith(f"{ACTOR}.clip_ratio=0.3: ") for item in plain.dropped)
    empty = convert(f"{VERL} {ACTOR}.clip_ratio=0.3 {ACTOR}.clip_ratio_low=null {ACTOR}.clip_ratio_high=0.4")
    assert (empty.config.algorithm.clip_low, empty.config.algorithm.clip_high) == (0.3, 0.4)
    neither = convert(f"{VERL} {ACTOR}.clip_ratio_low=null {ACTOR}.clip_ratio_high=null")
    assert (neither.config.algorithm.clip_low, neither.config.algorithm.clip_high) == (0.2, 0.2)


def test_control_characters_do_not_get_into_comments() -> None:
    found = convert(f"{SWIFT} --mcore_model 'a\x1b[2J\nrun: {{seed: 1}}' --model '/m\x07'")
    assert found.text.isprintable() is False and "\x1b" not in found.text  # line breaks are not printable either
    assert from_dict(yaml.safe_load(found.text)) == found.config and found.config.model.path == "/m\x07"


def test_strange_arguments_are_listed() -> None:
    found = convert(f"{SWIFT} --something_of_our_own 3")
    assert found.dropped[-1] == "not known as arguments of Megatron-SWIFT: --something_of_our_own 3"


@given(
    nodes=st.integers(1, 3),
    each=st.sampled_from([1, 2, 4, 8]),
    micro=st.integers(1, 4),
    accumulation=st.integers(1, 4),
    group=st.integers(2, 8),
    steps=st.integers(1, 5),
    by_size=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_sizes_of_megatron_swift(
    nodes: int, each: int, micro: int, accumulation: int, group: int, steps: int, by_size: bool
) -> None:
    update = micro * nodes * each * accumulation * group  # a multiple of all that it must be one of
    rollout = f"--generation_batch_size {update * steps}" if by_size else f"--steps_per_generation {steps}"
    text = (
        f"NNODES={nodes} NPROC_PER_NODE={each} megatron rlhf --rlhf_type grpo --micro_batch_size {micro} "
        f"--global_batch_size {update} --num_generations {group} {rollout}"
    )
    found = make_plan(convert(text).config).quantities
    assert found["world_size"] == nodes * each
    assert found["global_batch_size"] == update
    assert found["generation_batch_size"] == update * steps
    assert found["num_rollout_prompts"] == update * steps // group


@given(
    mini=st.integers(1, 64),
    minis=st.integers(1, 6),
    rest=st.integers(0, 3),
    group=st.integers(2, 16),
    epochs=st.integers(1, 3),
    rollouts=st.integers(1, 50),
    micro=st.integers(1, 8),
)
@settings(max_examples=60, deadline=None)
def test_sizes_of_verl(mini: int, minis: int, rest: int, group: int, epochs: int, rollouts: int, micro: int) -> None:
    prompts = mini * minis + min(rest, mini - 1)
    text = (
        f"algorithm.adv_estimator=grpo data.train_batch_size={prompts} {ACTOR}.ppo_mini_batch_size={mini} "
        f"actor_rollout_ref.rollout.n={group} {ACTOR}.ppo_epochs={epochs} trainer.total_training_steps={rollouts} "
        f"{ACTOR}.ppo_micro_batch_size_per_gpu={micro} trainer.save_freq=2"
    )
    config = convert(text).config
    found = make_plan(config).quantities
    updates = len(range(0, prompts, mini)) * epochs  # one for each slice of the prompts, in each pass
    assert found["global_batch_size"] == mini * group
    assert found["generation_batch_size"] == prompts * group
    assert found["num_rollout_prompts"] == prompts
    assert config.run.max_steps == rollouts * updates and config.checkpoint.interval == 2 * updates
    assert config.batch.micro_batch_size == micro


@given(
    size=st.integers(1, 8),
    processes=st.integers(1, 16),
    accumulation=st.integers(1, 8),
    rollouts=st.integers(1, 5),
    group=st.integers(2, 8),
    how=st.sampled_from(["steps", "size", "neither"]),
)
@settings(max_examples=60, deadline=None)
def test_sizes_of_trl(size: int, processes: int, accumulation: int, rollouts: int, group: int, how: str) -> None:
    raw = {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": accumulation,
        "num_generations": group,
        "max_steps": 3,
    }
    micro_batches = accumulation * (rollouts if how != "neither" else 1)
    if how == "steps":
        raw["steps_per_generation"] = micro_batches
    elif how == "size":
        raw["generation_batch_size"] = size * processes * micro_batches
    found = make_plan(convert(yaml.safe_dump(raw), gpus=processes).config).quantities
    assert found["world_size"] == processes
    assert found["global_batch_size"] == size * processes * accumulation
    assert found["generation_batch_size"] == size * processes * micro_batches
    assert found["gradient_accumulation_steps"] == accumulation


@pytest.mark.parametrize(
    "script",
    [
        "a b \\\n  c # d\ne",
        'X=1; Y="$X 2"\na $Y "$Y" \'$Y\' \\$X',
        'a ${X:-b c} ${Y-d} "${Z:-e f}"',
        "N=$((2 * (3 + 4) / 5))\na $N $((N % 2)) $((-N + 1))x",
        'X=a.b\nY="${X//a./c.}"\nd $Y',
        "if [ x = y ]; then\na\nelif [[ x != y ]]; then b\nelse\nc\nfi\nd",
        "if [[ $Q == 1 ]]; then a; else b; fi",
        'if [ -z "${Q}" ]; then if [ 1 = 2 ]; then a; else b; fi; else c; fi; d',
        "A=(\n  x=1 # one\n  'y z'\n)\na \"${A[@]}\" end",
        "export P=1 Q=2\nR=3 a $P$Q",
        "a data#10 2>&1 ; b 'c;d' \"e|f\" > /dev/null && d x=y",
        "a ''  \"\" 'it'\"'\"'s'",
        'L="\n  x=1 \\\n y=2"\na $L z',
        "X=b\nX=$X$X a; a $X",
        'P="say \\"hi\\" \\\\ $((1+1))"; a $P "$P"',
        "a '<|im_end|>' b \"<think> first\" c \\<d e'>'f '2>&1' '| tee x' \"&\" ';' '&&' end",
        "X='<a> & | ; > 2>b'; a $X c \"$X\" d",
        "a b 2>/dev/null c >&2 d 2 >/dev/null e2>/dev/null f &>/dev/null g 1>&2 </dev/null h",
        'a b >/dev/null 2>&1 && b c; d e 2>&1; e ${Q:-<x>} "$((3 * 2))" >/dev/null',
        "a x <<'E' 2>/dev/null y <<-F\nb it's <no> \"command\nE\n\tc\n\tF\nd <<< 'x y' z",
        'A=(\'<x>\' ">")\na "${A[@]}" end',
    ],
)
def test_scripts_are_read_as_bash_does(script: str) -> None:
    tell = "".join(f"{name}() {{ printf '%s\\0' {name} \"$@\" >&3; printf '\\1\\0' >&3; }}\n" for name in "abcde")
    done = subprocess.run(
        ["bash", "-c", f"exec 3>&1\n{tell}{script}"], capture_output=True, text=True, timeout=20, check=True, env={}
    )
    commands = [tuple(part.split("\0")[:-1]) for part in done.stdout.split("\1\0")[:-1]]
    assert commands and [command.words for command in read_script(script)] == commands


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("a \\ \n  b\r\nc", [("a", "b"), ("c",)]),  # a blank after the continuation: meant as one
        ('a ${Z} $((M + 1)) "$(f x y)" $R', [("a", "${Z}", "$((M+1))", "$(f...)", "$R")]),
        ("a $@ ${@:2} ${1:-b}", [("a", "b")]),
        ("a 2>&1 | c log &\nb &> d", [("a",), ("c", "log"), ("b",)]),
        ("if some_program; then a; fi; b", [("b",)]),
        ("a b > >(tee -a x | c) 2>&1 d $(e<f) <(g h)", [("a", "b", "d", "$(e<f)", "<(g", "h)")]),
    ],
)
def test_what_a_shell_would_run_or_find_is_left(script: str, words: list[tuple[str, ...]]) -> None:
    assert [command.words for command in read_script(script)] == words


@given(st.text(alphabet="ab$ {}()'\"\\#\n=;:-[]@/1|&<>`", max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_script_is_read_or_refused(script: str) -> None:
    try:
        read_script(script)
    except ValueError as refused:
        assert str(refused)


@given(st.lists(st.text(alphabet="ab -_'\"$=#<>|&;2", min_size=1, max_size=8), max_size=4))
@example(["==", "==", "=~", "=="])  # the grammar takes each for an operator
@settings(max_examples=100, deadline=None)
def test_quoted_words_arrive_unchanged(words: list[str]) -> None:
    for behind in ("", " 2>&1 | tee log", " > log 2>&1 &", "; tail log", " && tail log"):
        command, *_ = read_script("program " + shlex.join(words) + behind)
        assert command.words == ("program", *words)


@pytest.mark.parametrize("text", ["'<|im_end|>'", '"<think> first"', "'> x' 2>&1", "\\<a", "x > log 2>&1", "'2>&1'"])
def test_nothing_behind_a_smaller_sign_is_lost(text: str) -> None:
    """Quoted it is text; where it sends output elsewhere, the words behind it are arguments still."""
    plain = convert("megatron rlhf --rlhf_type grpo --stop_words x --global_batch_size 128 --num_generations 8", gpus=8)
    told = convert(
        f"megatron rlhf --rlhf_type grpo --stop_words {text} --global_batch_size 128 --num_generations 8", gpus=8
    )
    assert told.config == plain.config and told.config.batch.global_batch_size == 128
    assert any("stop_words" in line for line in told.dropped)


def test_words_before_the_options_and_behind_a_semicolon_are_told() -> None:
    found = convert(f"{SWIFT.replace('rlhf ', 'rlhf $MORE stray ', 1)} --lr 1e-6")
    assert "$MORE: not set in the script; what it adds is not known" in found.assumed
    assert "stray: no argument" in found.dropped
    cut = "megatron rlhf --rlhf_type grpo --num_generations 4 --system Think;answer --global_batch_size 32 --lr 1e-6"
    told = "answer --global_batch_size ... is a command of its own to a shell: put quotes around text with ; & |"
    assert told in convert(cut).assumed
    quoted = convert(cut.replace("Think;answer", "'Think;answer'"))
    assert told not in quoted.assumed and quoted.config.batch.global_batch_size == 32


def test_options_take_several_values_dashes_and_equals_signs() -> None:
    values, before = options(
        ["run", "--target-modules", "a", "b", "--top_k", "-1", "--lr=1e-6", "--finetune", "--x", "{}"]
    )
    assert before == ["run"]
    assert values == {"target_modules": ["a", "b"], "top_k": "-1", "lr": "1e-6", "finetune": True, "x": "{}"}


def test_a_mistake_says_which_values_are_not_known() -> None:
    run = "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo"
    with pytest.raises(ValueError) as refused:
        convert(f"{run} actor_rollout_ref.rollout.n=$(nproc) trainer.nnodes=$N")
    text = str(refused.value)
    assert "must be 2 or more" in text and "actor_rollout_ref.rollout.n=$(nproc): its value is known only" in text
    assert "nnodes" not in text and len(text.splitlines()) == 1
    chosen = 'if [ "$USER" = a ]; then S=fsdp; else S=megatron; fi\n'
    with pytest.raises(ValueError) as refused:
        convert(f"{chosen}{run} actor_rollout_ref.actor.strategy=$S actor_rollout_ref.rollout.n=8")
    assert str(refused.value).count("known") == 1 and "default" not in str(refused.value)
    with pytest.raises(ValueError, match=r"gspo_hpc already, so there is nothing to convert"):
        convert("model: {path: m}\nrollout: {top_p: 1}\noptimizer: {lr: 1e-6}\n", "swift")


BELOW = "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8"
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        (f"{_ACTOR}.fsdp_config.parm_offload", f"{_ACTOR}.fsdp_config.param_offload"),
        ("critic_x.fsdp_config.reshard_after_foward", "critic_x.fsdp_config.reshard_after_forward"),
        (f"{_ACTOR}.fsdp_config.qat.enabel", f"{_ACTOR}.fsdp_config.qat.enable"),
        (f"{_ACTOR}.veomni.activation_gpu_limmit", f"{_ACTOR}.veomni.activation_gpu_limit"),
        (f"{_ROLLOUT}.multi_turn.enabel", f"{_ROLLOUT}.multi_turn.enable"),
        (f"{_ROLLOUT}.agent.num_worker", f"{_ROLLOUT}.agent.num_workers"),
        ("actor_rollout_ref.model.lora.rnk", "actor_rollout_ref.model.lora.rank"),
        ("actor_rollout_ref.ref.megatron.param_ofload", "actor_rollout_ref.ref.megatron.param_offload"),
        ("algorithm.rollout_correction.bypas_mode", "algorithm.rollout_correction.bypass_mode"),
        ("trainer.v1.trainer_mod", "trainer.v1.trainer_mode"),
    ],
)
def test_a_misspelt_name_below_a_section_of_verl_is_a_mistake(given: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=rf"unknown argument {re.escape(given)}; nearest: {re.escape(nearest)}"):
        convert(f"{BELOW} {given}=1")


@pytest.mark.parametrize(
    "given",
    [
        f"{_ACTOR}.fsdp_config.zzz",
        f"{_ROLLOUT}.agent.activate_agent",
        f"{_ROLLOUT}.multi_turn.bar",
        "algorithm.rollout_correction.rollout_iss",
        "actor_rollout_ref.model.mtp.foo",
        "trainer.v1.sampler.foo",
        f"{_ROLLOUT}.checkpoint_engine.foo",
    ],
)
def test_a_strange_name_below_a_section_of_verl_is_unknown(given: str) -> None:
    found = convert(f"{BELOW} {given}=7")
    assert [item.given for item in found.strange] == [f"{given}=7"]
    assert any(line.startswith(f"{given}=7 is no known argument") for line in found.assumed)


@pytest.mark.parametrize(
    "given",
    [
        f"{_ACTOR}.fsdp_config.turbo_config.module_patches",
        f"{_ACTOR}.megatron.override_transformer_config.anything",
        f"{_ROLLOUT}.engine_kwargs.vllm.anything",
        "data.apply_chat_template_kwargs.anything",
        "reward_model.reward_kwargs.anything",
        f"{_ACTOR}.checkpoint.save_contents",
        f"{_ACTOR}.fsdp_config.mixed_precision.buffer_dtype",
    ],
)
def test_mappings_that_take_any_key_and_names_of_verl_are_known(given: str) -> None:
    assert not convert(f"{BELOW} {given}=7").strange
