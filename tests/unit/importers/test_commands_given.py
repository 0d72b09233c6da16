"""Commands that a shell gets from elsewhere: through a pipe, by a launcher, over ssh or in tmux (seconds)."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_hpc.importers.convert import Converted, convert
from gspo_hpc.importers.scripts.scope import is_unset
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
    "kubectl exec -it pod -c main -- bash -lc {}",
    "ray job submit --address=x --runtime-env-json='{{}}' -- bash -c {}",
    "enroot start -m a:b image sh -c {}",
]
PASSING = ("uv run bash -c {}", "conda run -n x --no-capture-output bash -lc {}", "nsys profile -o x bash -c {}")


@pytest.mark.parametrize("start", PASSING)
def test_launchers_that_hand_their_environment_on_do_so(start: str) -> None:
    found = convert("export NPROC_PER_NODE=2 LR=3e-6\n" + start.format(f"'{RUN} $LR'"))
    assert found.config.optimizer.lr == 3e-6 and found.config.cluster.gpus_per_node == 2 and not found.open


@pytest.mark.parametrize(
    "start",
    [
        "ray job submit --working-dir . -- bash {}",
        "ray job submit -- ./{}",
        "kubectl exec pod -- bash -x {}",
        "uv run bash {}",
        "flock lock ./{}",
        "some_launcher --np 8 bash {}",
    ],
)
def test_scripts_that_any_launcher_gives_to_a_shell_are_followed(start: str, tmp_path: Path) -> None:
    (tmp_path / "inner.sh").write_text(f"{RUN} $1\n")
    found = convert(f"NPROC_PER_NODE=2 {start.format('inner.sh')} 4e-6", folder=tmp_path, name="run.sh", gpus=2)
    assert found.config.optimizer.lr == 4e-6 and not found.open


@pytest.mark.parametrize(("text", "rate"), [("bash -s", 1e-6), ("bash -s 4e-6", 4e-6), ("sh -x -s 4e-6", 4e-6)])
def test_a_shell_on_another_machine_reads_its_input(text: str, rate: float, tmp_path: Path) -> None:
    (tmp_path / "inner.sh").write_text(f"export NPROC_PER_NODE=2\n{RUN} ${{1:-1e-6}}\n")
    found = convert(f"ssh host '{text}' < inner.sh", folder=tmp_path, name="run.sh")
    assert found.config.optimizer.lr == rate and found.config.cluster.gpus_per_node == 2


@pytest.mark.parametrize("start", ["echo bash -c {}", "parallel bash -c {} ::: 1", "python x.py bash -c {}"])
def test_words_that_nothing_starts_are_no_run(start: str) -> None:
    with pytest.raises(ValueError, match="no run of .* is recognised"):
        convert(start.format(f"'{RUN} 1e-6'"))


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
    program = next(name for name in ("ssh", "tmux", "docker", "kubectl", "ray", "enroot") if f"{name} " in start)
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


KNOWN = [
    "printf -v LR '%.2f' 0.256; swift $LR",
    "printf -v A '%d-%s' 8 x; swift $A",
    "printf -v A '%.1f' 2; swift $A",
    "printf -v A 'a%sb' 1 2; swift $A",
    "printf -v A '%s\\n' x; swift \"$A\"",
    "printf -v A x; swift $A",
    "printf -v A '%s' 'a  b'; swift \"$A\"",
    "X=$(printf '%.3f' 1.5); swift $X",
    "printf -v A '%d'; swift $A",
    "printf -v A '%.0f' 2.7; swift $A",
    "IFS=: read -r A B <<< 'x:y'; swift $A $B",
    "IFS=: read -r A B <<< 'x:y:z'; swift $A $B",
    "IFS=: read A B C <<< 'x:y'; swift $A $B \"$C\"",
    "IFS=, read -ra A <<< 'x,y,z'; swift ${A[1]} ${#A[@]}",
    'read -r A B <<< \'  x   y z  \'; swift "$A" "$B"',
    "read A <<< 'x y'; swift \"$A\"",
    "IFS= read -r A <<< '  x y '; swift \"$A\"",
    "M=a:b; IFS=: read -r A B <<< \"$M\"; swift $A $B; read C D <<< 'a:b c'; swift $C $D",
    'read -r A B <<< "x"; swift "$A" "$B"',
    "IFS=':,' read -r A B C <<< 'x:y,z'; swift $A $B $C",
    'IFS=: read -r A B <<< \'x::y\'; swift "$A" "$B"',
    "read -ra A <<< 'x  y'; swift ${#A[@]} ${A[1]}",
    "IFS=- read -r A B <<< 'x-y'; swift $A $B",
    "IFS=: read -r A A <<< 'x:y'; swift $A",
    "IFS=: read -ra A <<< ''; swift ${#A[@]}",
    'IFS=: read -r A B <<< \':y\'; swift "$A" "$B"',
    "M=Qwen-7B; if [[ $M =~ -([0-9]+)B$ ]]; then S=${BASH_REMATCH[1]}; else S=0; fi; swift $S",
    "M=Qwen; if [[ $M =~ -([0-9]+)B$ ]]; then S=${BASH_REMATCH[1]}; else S=0; fi; swift $S",
    "M=Qwen2.5-7B; [[ $M =~ ([A-Za-z]+)([0-9.]*)-(.*) ]] && swift ${BASH_REMATCH[@]}",
    'M=axb; [[ $M =~ "a." ]] || swift no',
    "R='^q'; M=qw; [[ $M =~ $R ]] && swift yes ${BASH_REMATCH[0]}",
    "M=7B; [[ ! $M =~ ^[0-9]+B$ ]] || swift ${BASH_REMATCH[0]}",
    'M=aab; [[ $M =~ (a*)(a+) ]] && swift "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}"',
    'M=aab; [[ $M =~ (a*)(ab*) ]] && swift "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}"',
    "M=q8b; [[ $M =~ q[0-9]{1,2}b ]] && swift ok",
    "M=q; [[ $M =~ Q ]] || swift n",
    "swift {a,b}.jsonl",
    "swift /d/{train,val}.jsonl",
    "swift x{1,2}{a,b}",
    "swift --x={a,b}",
    "A=(d/{a,b}); swift ${A[@]} ${#A[@]}",
    "swift {a}",
    "swift {a,b",
    "swift a{,b}",
    'swift "{a,b}"',
    "swift {1.5,2}",
    "swift k={lr:5e-7,wd:0.1}",
]
LEFT_OPEN = [
    "printf -v A '%.2f' 0.125; swift $A",
    "printf -v A '%d' 08; swift $A",
    "printf -v A '%05d' 3; swift $A",
    "IFS=: read -r A B <<< 'x:y:'; swift $A $B",
    "read -n 1 A <<< xyz; swift $A",
    "IFS=' :' read A B <<< 'x : y'; swift $A $B",
    "M=abc; [[ $M =~ a|ab ]] && swift ${BASH_REMATCH[0]}",
    "M=ab; [[ $M =~ (a?)(ab)? ]] && swift ${BASH_REMATCH[0]}",
    'M=x; [[ $M =~ (y)?x ]] && swift "${BASH_REMATCH[1]}" ${#BASH_REMATCH[@]}',
    "swift {a,{b,c}}",
    "swift {a..c}",
    "X={a,b}; swift $X",
    "swift {,}",
    "swift $HOME/{a,b}",
    "swift {a,b}*",
]


@pytest.mark.parametrize("script", [*KNOWN, *LEFT_OPEN])
def test_what_a_script_alone_decides_is_as_in_bash_or_told(script: str, tmp_path: Path) -> None:
    """Values come from printf -v, read with a here-string, an expression that is matched, and braces."""
    read, told = given_to_swift(script, tmp_path, {})
    assert told and (read == told if script in KNOWN else not read or any(map(is_unset, read[0])))


@pytest.mark.parametrize(
    "script",
    [
        "LOG=$({} 3e-6 2>&1)",
        "run() {{ {} $1; }}; LOG=$(run 3e-6)",
        "N=$(basename train_grpo.py .py); P=$(pgrep -f main_ppo); {} 3e-6",
        'echo "`{} 3e-6`" | tee log',
        "LR=3e-6; export LOG=$({} $LR)",
        'script -q -e -c "LR=3e-6; {} \\$LR" /dev/null',
        'LR=3e-6; script log -c "{} $LR"',
        "run() {{ {} $1; }}; export -f run; bash -c 'run 3e-6'",
        "run() {{ {} $1; }}; declare -fx run; nice bash -c 'LR=3e-6; run $LR'",
        "T=$(mktemp); cat > $T <<E\n{} 3e-6\nE\nbash $T",
        'T=`mktemp -t x.XXXX`; echo \'{} 3e-6\' > "$T"; bash "$T"',
        "cat > run_$$.sh <<E\n{} 3e-6\nE\nbash run_$$.sh",
        "T=$(mktemp); U=$(mktemp); echo LR=3e-6 > $T; echo LR=4e-6 > $U; . $T; {} $LR",
        "f() {{ T=$(mktemp); }}; f; A=$T; f; echo LR=3e-6 > $A; echo LR=4e-6 > $T; . $A; {} $LR",
        "D=$(mktemp -d); echo LR=3e-6 > $D/e.sh; echo LR=4e-6 > e.sh; . $D/e.sh; {} $LR",
    ],
)
def test_runs_in_other_words_are_followed(script: str, tmp_path: Path) -> None:
    text = f"{script.format(RUN)}\n"
    assert convert(text, folder=tmp_path, name="run.sh").config.optimizer.lr == 3e-6
    if "script " not in text:  # is not everywhere
        _, told = given_to_swift(text, tmp_path, {})
        assert [one[-1] for one in told] == ["3e-6"]


def test_jobs_of_other_batch_systems_are_followed_or_named(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(f"#PBS -l nodes=1\n{RUN} ${{LR:-3e-6}}\n")
    for known in (
        "salloc -N2 --gres=gpu:4 bash job.sh",
        "salloc ./job.sh",
        "salloc srun bash job.sh",
        "qsub -V job.sh",
    ):
        assert convert(f"{known}\n", folder=tmp_path, name="run.sh").config.optimizer.lr == 3e-6
        assert convert(f"export LR=4e-6\n{known}\n", folder=tmp_path, name="run.sh").config.optimizer.lr == 4e-6
    for start in ("qsub -q x -v A=1 job.sh", "bsub < job.sh"):
        assert convert(f"export LR=4e-6\n{start}\n", folder=tmp_path, name="run.sh").open == (
            "--learning_rate ${LR:-3e-6}",
        )
    for start in ("qsub gone.sh", "salloc bash gone.sh"):
        with pytest.raises(
            ValueError, match=r"starts gone\.sh with \w+, which is not at hand: convert gone\.sh itself"
        ):
            convert(f"{start}\n", folder=tmp_path, name="run.sh")
    for start in ("su - u -c", "su u --command", "runuser -u u -c"):
        found = convert(f"export LR=4e-6\n{start} '{RUN} $LR'\n")
        assert found.open == ("--learning_rate $LR",) and any("may be set by " in line for line in found.assumed)


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("python - <<E\nfrom trl import GRPOConfig\na = GRPOConfig(beta=0.1)\nE", "put that into a file of its own"),
        (f"finish() {{ {RUN} 3e-6; }}; trap finish EXIT", "line 1: the handler finish of trap, which runs at the end"),
        (f"trap '{RUN} 3e-6' 0 INT", "the handler swift of trap, which runs at the end, is not followed: convert its"),
    ],
)
def test_what_is_not_followed_is_refused_with_the_way_out(script: str, told: str) -> None:
    with pytest.raises(ValueError) as refused:
        convert(f"{script}\n")
    assert told in str(refused.value)


def test_a_yaml_that_the_script_writes_to_a_name_of_mktemp_is_read(tmp_path: Path) -> None:
    yaml = "rlhf_type: grpo\nmodel: q\nnum_generations: 8\nlearning_rate: 3e-6\n"
    for name in ("$(mktemp)", "$(mktemp /tmp/x.XXXX.yaml)", "c_$$.yaml"):
        text = f"T={name}\ncat > $T <<E\n{yaml}E\nswift rlhf --config $T\n"
        assert convert(text, folder=tmp_path, name="run.sh").config.optimizer.lr == 3e-6
        with pytest.raises(ValueError, match="is changed by the script in a way that is not followed"):
            convert(text.replace("swift", "sed -i s/3/4/ $T\nswift"), folder=tmp_path, name="run.sh")
