"""Variables that a batch system or a launcher sets: whether they are set is not known here (under 2 s)."""

from __future__ import annotations

import pytest

from gspo_hpc.importers.convert import Converted, convert

RUN = "megatron rlhf --rlhf_type grpo --num_generations 8 --lr $LR"
TRL = "python train_grpo.py --num_generations 8 --per_device_train_batch_size 8 --learning_rate $LR"


def _of(text: str) -> Converted:
    return convert(f"LR=1e-6\n{text}", gpus=None)


@pytest.mark.parametrize(
    "condition",
    [
        '[ -z "$SLURM_JOB_ID" ]',
        '[ -n "$CUDA_VISIBLE_DEVICES" ]',
        '[ -z "${SLURM_JOB_ID:-}" ]',
        '[ -z "${LSB_JOBID-}" ]',
        "[ $SLURM_JOB_ID ]",
        "[[ -n $PBS_JOBID && 1 == 1 ]]",
        "[[ -v SLURM_JOB_ID ]]",
        "[[ ${SLURM_JOB_ID+x} ]]",
        '[ "${SLURM_JOB_ID:+set}" = set ]',
        "(( SLURM_NNODES > 1 ))",
        '[ "$SLURM_NNODES" -gt 1 ]',
        '[ "$WORLD_SIZE" != 1 ]',
        '[ "$RANK" = 0 ]',
        '[ "$NODE_RANK" = 0 ]',
        '[ "$LOCAL_RANK" = 0 ]',
        '[ -z "$MASTER_ADDR" ]',
        '[ -z "$HOSTNAME" ]',
    ],
)
def test_what_depends_on_such_a_variable_is_not_known(condition: str) -> None:
    for text in (f"if {condition}; then LR=2e-6; fi\n", f"{condition} && LR=2e-6\n"):
        found = _of(text + RUN)
        assert found.open == ("--lr $LR",)
        assert "$LR depends on a condition in line 2" in {item.name: item.why for item in found.left}["lr"]
    assert _of(f"if {condition}; then LR=2e-6; else LR=2e-6; fi\n{RUN}").config.optimizer.lr == 2e-6  # in any case


@pytest.mark.parametrize(
    "text",
    [
        'J=${SLURM_JOB_ID:-}\nif [ -z "$J" ]; then LR=2e-6; fi\n',
        "case $PBS_QUEUE in long) LR=2e-6;; esac\n",
        'check() { [ -n "$SLURM_JOB_ID" ]; }\nif check; then LR=2e-6; fi\n',
    ],
)
def test_by_other_ways_too(text: str) -> None:
    assert _of(text + RUN).open == ("--lr $LR",)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ('SLURM_JOB_ID=3\nif [ -z "$SLURM_JOB_ID" ]; then LR=2e-6; fi\n', 1e-6),  # the script sets it
        ('if [ -z "$MY_JOB" ]; then LR=2e-6; fi\n', 2e-6),  # a variable like any other
        ('if [ -z "$NNODES" ]; then LR=2e-6; fi\n', 2e-6),
        ('if [ "${RATE:-2e-6}" = 2e-6 ]; then LR=${RATE:-2e-6}; fi\n', 2e-6),
    ],
)
def test_other_variables_count_as_not_set(text: str, rate: float) -> None:
    found = _of(text + RUN)
    assert found.config.optimizer.lr == rate and not found.open


@pytest.mark.parametrize(
    ("text", "shape", "decides"),
    [
        (f"NNODES=${{SLURM_NNODES:-2}} NPROC_PER_NODE=8 {RUN}", (2, 8), {"SLURM_NNODES": "NNODES"}),
        (
            f"export NNODES=${{WORLD_SIZE:-2}}\nexport NPROC_PER_NODE=${{SLURM_GPUS_ON_NODE:=4}}\n{RUN}",
            (2, 4),
            {"WORLD_SIZE": "NNODES", "SLURM_GPUS_ON_NODE": "NPROC_PER_NODE"},
        ),
        (
            f"export CUDA_VISIBLE_DEVICES=${{CUDA_VISIBLE_DEVICES:-0,1}}\n{TRL}",
            (1, 2),
            {"CUDA_VISIBLE_DEVICES": "CUDA_VISIBLE_DEVICES"},
        ),
        (
            "N=2\nif [ ${SLURM_NNODES:-1} -gt 1 ]; then N=4; fi\n"
            f"NNODES=$N NPROC_PER_NODE=8 {RUN} --seed ${{RANK:-3}}",
            (2, 8),
            {"SLURM_NNODES": "NNODES", "RANK": "seed"},
        ),
        (
            f"deepspeed --num_nodes ${{SLURM_NNODES:-2}} --num_gpus ${{SLURM_GPUS_ON_NODE:-4}} {TRL[7:]}",
            (2, 4),
            {"SLURM_NNODES": "num_nodes", "SLURM_GPUS_ON_NODE": "num_gpus"},
        ),
        (f"MASTER_PORT=${{MASTER_PORT:-29500}} NODE_RANK=${{RANK:-0}} NPROC_PER_NODE=8 {RUN}", (1, 8), {}),
        (f"NNODES=${{NODES:-2}} NPROC_PER_NODE=8 {RUN}", (2, 8), {}),
    ],
)
def test_a_default_of_the_script_is_taken_and_what_it_decides_is_told(
    text: str, shape: tuple[int, int], decides: dict[str, str]
) -> None:
    found = _of(text)
    assert (found.config.cluster.nodes, found.config.cluster.gpus_per_node) == shape and not found.open
    told = [line for line in found.assumed if "the script's default is taken" in line]
    assert told == [
        f"${variable}: the script's default is taken, and decides {names}; "
        "a batch system or a launcher may set another value"
        for variable, names in decides.items()
    ]


def test_a_default_that_decides_which_run_starts_is_told() -> None:
    default, others = (
        "$SLURM_NNODES: the script's default is taken",
        "; a batch system or a launcher may set another value",
    )
    text = f"case ${{SLURM_NNODES:-1}} in 1) {RUN} ;; *) {RUN} --seed 3; {RUN} --beta 1 ;; esac"
    assert f"{default}, and decides seed, beta{others}" in _of(text).assumed
    text = f"case ${{SLURM_NNODES:-1}} in 1) {RUN} ;; *) python -m openrlhf.cli.train_ppo_ray --pretrain x ;; esac"
    (line,) = [line for line in _of(text).assumed if line.startswith(default)]
    assert line.startswith(f"{default}; with another value it is refused: this is a run of OpenRLHF, ")


def test_a_value_without_a_default_says_who_may_set_it() -> None:
    left = {item.name: item.why for item in _of(f"{RUN} --seed $SLURM_NNODES").left}
    assert left["seed"].startswith(
        "$SLURM_NNODES is not set in the script, and a batch system or a launcher may set it"
    )


_SWIFTS = (
    "--rlhf_type grpo --model m --dataset d.jsonl --reward_funcs accuracy --num_generations 4 --tuner_type full "
    "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --learning_rate 1e-6"
)


@pytest.mark.parametrize("source", [None, "ms-swift"])
@pytest.mark.parametrize(
    "start",
    [
        'P=$(python -c "import swift.cli.rlhf as r; print(r.__file__)")\ntorchrun --nproc_per_node 4 $P',
        "torchrun --nproc_per_node 4 my_entry.py",
        "python -m torch.distributed.run --nproc_per_node 4 $ENTRY",
        'if command -v uv; then S=(uv run swift); else S=(swift); fi\nNPROC_PER_NODE=4 "${S[@]}" rlhf',
    ],
)
@pytest.mark.parametrize("more", ["", "--external_plugins plugin.py", "--external_plugins a.py my_reward.py"])
def test_a_program_with_the_argument_of_ms_swift_is_ms_swift(start: str, more: str, source: str | None) -> None:
    """A file that an option names is no program, and what the script does not tell of a program its options may."""
    found = convert(f"{start} {_SWIFTS} {more}", source)
    assert found.project == "ms-swift"
    assert found.config.algorithm.kl_beta == 0.04 and found.config.batch.global_batch_size == 32
    assert any("--rlhf_type is an argument of ms-swift" in line for line in found.assumed)


def test_arguments_of_trl_are_no_run_of_ms_swift() -> None:
    text = "python train.py --model_name_or_path m --num_generations 4 --beta 0.1 --max_completion_length 99"
    with pytest.raises(ValueError, match="train.py has arguments of TRL, and no --rlhf_type"):
        convert(text, "ms-swift")


def test_variables_that_a_line_of_sbatch_exports_are_set() -> None:
    run = "swift rlhf --rlhf_type grpo --model q --gradient_accumulation_steps 8 --num_generations 8"
    head = "#!/bin/bash\n#SBATCH --export=ALL,LR=2e-6,NPROC_PER_NODE=4\n"
    found = convert(f"{head}{run} --learning_rate ${{LR:-1e-6}}\n")
    assert (found.config.optimizer.lr, found.config.cluster.gpus_per_node) == (2e-6, 4)
    assert "$LR: 2e-6, by a line #SBATCH; sbatch may be given another" in found.assumed
