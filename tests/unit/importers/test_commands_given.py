"""Commands that a shell gets from elsewhere: through a pipe, by a launcher, over ssh or in tmux (seconds)."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_hpc.importers.convert import Converted, convert
from tests.unit.importers.in_bash import given_to_swift

RUN = "swift rlhf --rlhf_type grpo --model q --gradient_accumulation_steps 8 --num_generations 8 --learning_rate"
END = "the original run may have had other values"


@pytest.mark.parametrize(
    "script",
    [
        "cat inner.sh | bash",
        "LR=1 N=2; export LR\ncat inner.sh | bash -s 5 6",
        "cat set.sh inner.sh | LR=3 bash -s -- 5",
        "LR=2\necho \"swift $LR \\${LR-none}\" | bash",
        "export LR=2\necho \"LR=3; swift $LR \\$LR\" | bash 2>/dev/null",
        "printf '%s\\n' 'swift 1' 'swift 2' | sh",
        "echo swift 4 | LR=2 bash -e",
        "export LR=1\nbash <(cat inner.sh) 5 6",
        "F=inner.sh\nLR=1 bash <( cat $F ) 7",
        "bash <(echo 'swift $1') 8",
        "export LR=1\nnice bash -s 5 < inner.sh",
        "export LR=1\nnice timeout 9 sh <<< 'swift $LR'",
        "export LR=1\necho 'swift $LR' | nice timeout 9 bash",
        "export LR=1\nnice timeout 9 bash -c 'N=2; LR=$((LR + N)); swift $LR $N $1' x 7",
        "LR=1\nnice bash -c \"N=2; swift $LR \\$N \\${LR-none}\"",
    ],
)  # fmt: skip
def test_what_a_shell_reads_or_is_given(script: str, tmp_path: Path) -> None:
    read, told = given_to_swift(
        script, tmp_path, {"inner.sh": 'swift "${LR-none}" "${N-none}" "$#" "$@"\n', "set.sh": "N=9\n"}
    )
    assert read == told and told


@pytest.mark.parametrize(
    "script",
    [
        "make_script | bash",
        "cat inner.sh | sed s/1/2/ | bash",
        "cat own.sh | bash",
        "bash <(curl -s http://a/b.sh)",
        "cat - | bash",
        "echo() { make_script; }; echo a | bash",
        "curl -s http://a/b.sh | nice bash",
    ],
)
def test_other_commands_are_refused_with_the_way_out(script: str, tmp_path: Path) -> None:
    (tmp_path / "inner.sh").write_text(f"{RUN} 1e-6\n")
    (tmp_path / "own.sh").write_text(f'cd "$(dirname "$0")"\n{RUN} 1e-6\n')
    with pytest.raises(ValueError, match="the commands that bash reads from its input are not followed: convert them"):
        convert(script, folder=tmp_path, name="run.sh")
    with pytest.raises(ValueError, match="starts gone.sh with bash, which is not at hand: convert gone.sh itself"):
        convert("cat gone.sh | bash", folder=tmp_path, name="run.sh")


STARTS = [
    "ssh host {}",
    "ssh -p 22 -o StrictHostKeyChecking=no -tt me@host {}",
    "ssh -p22 host -n {} &",
    "for h in $HOSTS; do ssh $h {} & done; wait",
    "tmux new -d {}",
    "tmux -L x new-session -d -s train -c /x {}",
    "tmux new-window -t a:1 -n x {}",
    "tmux send-keys -t train {} C-m",
    "tmux send -t train {} Enter",
    "docker exec -it box bash -lc {}",
]


@pytest.mark.parametrize("start", STARTS)
def test_commands_elsewhere_are_followed_and_their_environment_is_not_known(start: str) -> None:
    head = "export NPROC_PER_NODE=2 LR=3e-6\nread HOSTS\n"

    def of(text: str) -> Converted:
        return convert(head + start.format(text))

    found = of(f"'cd /x && export NPROC_PER_NODE=4; LR=2e-6; {RUN} $LR'")
    assert found.config.optimizer.lr == 2e-6 and found.config.cluster.gpus_per_node == 4 and not found.open
    assert of(f'"NPROC_PER_NODE=4 {RUN} $LR"').config.optimizer.lr == 3e-6
    found = of(f"'{RUN} $LR'")
    assert found.open == ("--learning_rate $LR",)
    program = next(name for name in ("ssh", "tmux", "docker") if name in start)
    told = f"$LR may be set by {program}, which starts a shell in line 3"
    assert any(line.startswith(f"--learning_rate $LR: {told}") for line in found.assumed)


def test_words_for_tmux_that_no_key_sends_start_nothing() -> None:
    with pytest.raises(ValueError, match="no run of ms-swift, verl or TRL is recognised"):
        convert(f"tmux send-keys -t train '{RUN} 1e-6'")


@pytest.mark.parametrize("start", ["srun", "srun -N 2 --ntasks-per-node=1", "nice -n 3", "screen -dmS x"])
def test_a_launcher_that_hands_its_environment_on(start: str) -> None:
    head = "export NPROC_PER_NODE=2 LR=3e-6\nM=4e-6\n"
    found = convert(f"{head}{start} bash -c 'export NPROC_PER_NODE=4; {RUN} $LR'")
    assert found.config.optimizer.lr == 3e-6 and found.config.cluster.gpus_per_node == 4 and not found.open
    assert convert(f"{head}{start} bash -c '{RUN} ${{M:-5e-6}}'").config.optimizer.lr == 5e-6  # M is not exported
    assert convert(f"{head}{start} env LR=6e-6 bash -c '{RUN} $LR'").config.optimizer.lr == 6e-6
    assert convert(f"{head}{start} env -u LR bash -c '{RUN} ${{LR:-7e-6}}'").config.optimizer.lr == 7e-6
    assert convert(f"{head}{start} docker run box bash -c '{RUN} $LR'").open == ("--learning_rate $LR",)


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ('CMD="NPROC_PER_NODE=4 {} $*"\nbash -c "$CMD"', 1),
        ('bash -c "NPROC_PER_NODE=4 {} $*"', 1),
        ('export NPROC_PER_NODE=4\nbash -c "{} $*"', 2),
        ('sbatch --wrap "export NPROC_PER_NODE=4; {} $*"', 1),
        ('srun bash -c "export NPROC_PER_NODE=4; {} $*"', 1),
        ('ssh host "export NPROC_PER_NODE=4; {} $*"', 1),
        ("bash <<END\nNPROC_PER_NODE=4 {} $*\nEND", 1),
    ],
)
def test_arguments_within_commands_change_no_variable_that_the_commands_set(script: str, line: int) -> None:
    found = convert(script.format(f"{RUN} 1e-6"))
    (told,) = [line for line in found.assumed if line.endswith(END)]
    assert told == (
        f"the script's arguments (line {line}) are not set here, and may decide which arguments are added: {END}"
    )
    assert found.config.cluster.gpus_per_node == 4


def test_a_variable_in_commands_that_may_be_the_callers_is_not_known() -> None:
    for script in (
        'bash -c "LR=1e-6; {} $LR"',
        'bash -c "LR=1e-6; x $(date); {} \\$LR"',
        "bash -c \"bash -c 'LR=1; {} $LR'\"",
    ):
        assert convert(f"read LR\n{script.format(RUN)}", gpus=1).open == ("--learning_rate $LR",), script
    for text in ("LR=1e-6; $(date); {} \\$LR", "LR=1e-6; LR=$(date); {} \\$LR"):
        found = convert(f'bash -c "{text.format(RUN)}"', gpus=1)
        assert found.open and found.config.optimizer.lr != 1e-6


@pytest.mark.parametrize(
    ("words", "rate", "gpus"),
    [
        ("export A=b \\; NPROC_PER_NODE=8 {} 3e-6", 3e-6, 8),
        ("cd s \\&\\& LR=4e-6 \\; {} \\$LR", 4e-6, 1),
        ("NPROC_PER_NODE=4 {} 3e-6", 3e-6, 4),
        ("{} 3e-6 \\| tee log", 3e-6, 1),
        ("{} 3e-6", 3e-6, 1),
        ("LR=5e-6 \\; {} $LR", 2e-6, 1),  # the caller's
    ],
)
def test_several_words_for_ssh_are_read_by_a_shell_there(words: str, rate: float, gpus: int, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    found = convert(f"LR=2e-6\nssh -t host {words.format(RUN)}\n", folder=tmp_path, name="run.sh")
    assert (found.config.optimizer.lr, found.config.cluster.gpus_per_node, found.open) == (rate, gpus, ())
    script = f'LR=2e-6\nssh() {{ shift 2; bash -c "$*"; }}\nssh -t host {words.format(RUN)}'
    _, told = given_to_swift(script, tmp_path, {})
    assert float(told[0][-1]) == rate
