"""Rules of bash that are easily missed: each script is held against bash itself, and where the reader does not follow a
rule, the value must be told as not known. Takes about 2 s; would catch a wrong value that is carried over silently."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gspo_hpc.importers.convert import convert
from gspo_hpc.importers.inputs import read_text
from gspo_hpc.importers.scripts.scope import is_unset
from gspo_hpc.importers.scripts.shell import follow, read_script

from .in_bash import given_to_swift
from .test_shells_apart import in_bash

SWIFT = "swift rlhf --rlhf_type grpo --model q --num_generations 8"
RUN = "megatron rlhf --rlhf_type grpo --train_iters 5 --num_generations 8 --global_batch_size 32"


@pytest.mark.parametrize(
    "script",
    [
        # all elements, with a default or in place of it
        'A=(x "y z")\na ${A[@]+"${A[@]}"} "${A[@]:-}" "${A[@]:+${A[@]}}"\nb "${A[@]+set}"',
        'set -- p "q r"\na ${@+"$@"} "${@:-x}" "${@:+y}"\nb ${1+"$@"}',
        'A=()\na ${A[@]+"${A[@]}"} "${A[@]:-none}" "${@:-x}" "${@-y}" ${N[@]+z} end',
        # set, and what it sets
        "CFG='4e-6 0.5'\nset $CFG\na $1 $2 $#",
        "set a b c\na $2 $#\nset -e 3e-6 0.02\nb $1 $2\nset -o pipefail\na $1 $#\nset -- \nb $#",
        "set +e -u x\na $1\nset -\nb $1\nset - y\na $1",
        # no word at all, where a variable is never set
        "f() { a $1; }\nf $EXTRA 2e-6\nA=($EXTRA x)\nb ${A[0]} ${#A[@]}",
        "X=\nf() { a $1 $#; }\nf $X 2e-6\nfor i in $EXTRA 1 2; do S+=$i; done\nb $S",
        # separators
        'IFS=,\nL=1e-6,2e-6,,3\nset -- $L\na $1 $2 "$3" $4 "$*" $#',
        'A=(x y)\nIFS=:\na "${A[*]}" "$*"\nunset IFS\nb "${A[*]}"',
        'IFS=\', \'\nL=\' a , b,c ,\'\nset -- $L\na $# "$1" "$2" "$3"',
        "f() { local IFS=/; set -- $1; a $2; }\nf x/y/z\nset -- x/y\nb $1",
        # what a loop ends
        "for i in 1 2; do for j in 3 4; do LR=$i$j; break 2; done; done\na $LR",
        "S=\nfor i in 1 2; do for j in 3 4; do [ $j = 4 ] && continue 2; S+=$i$j; done; S+=x; done\na $S",
        "S=\nfor i in 1; do while true; do S+=y; break 9; done; S+=no; done\na $S",
        "f() { break; N=1; }\nfor i in 1 2; do f; S+=$i; done 2>/dev/null\nb $S $N",
        # elements by arithmetic, and the element that a plain assignment means
        "B=(1 2)\n(( B[0] = 5 ))\na ${B[0]} ${B[1]}\nlet 'B[1] += 5'\nb ${B[*]}",
        "A=(x y)\nA=1e-6\na $A ${A[0]} ${A[1]}\nA+=z\nb ${A[@]}",
        "A=(x y)\nA[-1]=w\na ${A[@]}\nE=\nE+=(q)\nb ${#E[@]}",
        # patterns
        'X="*"\ncase abc in "*") N=1 ;; [^a]*) N=2 ;; *) N=3 ;; esac\na $N\n[[ abc == "*" ]] || b quoted',
        "[[ abc == a\\* ]] || a 1\n[[ a* == a\\* ]] && a 2\nP='a*'\n[[ abc == $P ]] && a 3\n[[ abc == \"$P\" ]] || a 4",
        "shopt -s nocasematch\ncase ABC in abc) N=1 ;; *) N=2 ;; esac\na $N\n[[ X == x ]] && b",
        "shopt -s extglob\nX=aab\ncase $X in +(a)b) N=1 ;; *) N=2 ;; esac\na $N\nb ${X##+(a)}",
        "[[ aab == +(a|c)b ]] && a\n[[ x == @(y|z) ]] || b\n[[ 5 == [[:digit:]] ]] && a",
        'X=a*b\na "${X#a}" ${X/a/c}',
        # functions with redirections, read-only variables, text for eval
        "f() { LR=3; } 2>/dev/null\nf\na $LR",
        "readonly X=5\nexport X=6 2>/dev/null\na $X",
        "declare -r X=5\nf() { local X=6; Y=1; } 2>/dev/null\nf\na $X $Y",
        'eval "export PY=/opt/miniconda3/bin/python LR=5e-6"\na $PY $LR',
        "f() { eval 'local X=5'; a $X; }\nX=1\nf\nb $X",
        "f() { ( local X=5 ); X=7; }\nX=1\nf\na $X",
        # elements by a computed key
        'LRS=(1e-6 2e-6 3e-6)\nTASK=4\na ${LRS[$((TASK / 2))]} ${LRS[TASK-3]} "${LRS[$TASK - 3]}"',
        # escapes
        "a $'\\x41\\102\\e' $'x\\\\n'",
        "a $(echo x 2>/dev/null) \"$(echo 'y\n')\"",
        "X=1\na $(echo $((X++))) $X",
        "command export LRX=5\na done",
        "env f 2>/dev/null\nf() { LR=9; }\nLR=1\ncommand f 2>/dev/null\na $LR",
        # words that the grammar of the parser reads otherwise
        "A=x B=y\na $B\nA=1 B=2\na $A $B | cat",
        "a 1 \\ z'a|b'+x\nM=(\\ z q)\nb \"${M[@]}\"",
        'set -- p q\na z$*-- "$2"$1x $2 "x"`echo m`"y" z 2>&1',
        "t='[3,4]'\na ${t%\\]} ${t%]} ${t%%,4\\]} ${t%%]*}\nb ${t%,*\\]}x ${t/]/} ${t//]/y}",
        "case 7B$ in *7B$) a 1;; esac\nexec 9<>/dev/null\nexec {fd}<>/dev/null\n"
        "b $(echo x$)$ '$)' \"$(echo y$)\" `echo z$`",
        # arrays
        "L=([2]=q r)\nL=x\na $#\nM=+x\nb ${M:0:1}",
        "I=0\nif ! (( I++ )); then a $I; fi\nfor i in 1; do a $(( I + 1 )); done",
        # rounds that change what later ones do, and what ends a function from within a loop
        "f() { for C in 1 2; do return 1; done >/dev/null; C=x; }\nf\na $C",
        "f() { for C in 1; do return; done; C=x; }\nf\na $C",
        "f() { export A; }\nf\na ${A-n}\nA=x\nf\nbash -c 'exit'\nb $A",
        "set -o pipefail\nif false | true; then a 1; else a 2; fi",
    ],
)
def test_a_rule_is_followed_as_in_bash(script: str) -> None:
    told = in_bash(script)
    found = [item.words for item in read_script(script) if item.words[0] in ("a", "b")]
    assert told and found == told


@pytest.mark.parametrize(
    "before",
    [
        "LR=$?", "LR=$$", "LR=$!", "LR=$-", "LR=$_", "LR=${?}",
        "[[ lr5e-6 =~ (lr|l)(.*) ]]; LR=${BASH_REMATCH[2]}", "true | false; LR=${PIPESTATUS[0]}", "LR=${BASH_VERSION}",
        "LR=${RANDOM:-5}", "RANDOM=5; LR=$RANDOM", "SECONDS=0; LR=$SECONDS", "LR=$LINENO", "LR=${FUNCNAME:-x}",
        "LR=${EPOCHSECONDS}", "LR=${BASH_SUBSHELL:-0}",
        "f() { LR=$1; }; f $(cat x) 2e-6", "A=($(cat x) 2e-6); LR=${A[1]}", "f() { LR=$2; }; f $SLURM_X 1 2e-6",
        "A=($(cat x) 2e-6); LR=${A[-2]}", "set $(cat x) 2; LR=$2", "A=($(cat x)); LR=${#A[@]}",
        "IFS=$(cat x); A=(1 2); LR=${A[*]}", "IFS=$(cat x); Q=1,2; A=($Q); LR=${A[0]}",
        "if pip show x; then LR=1; else LR=2; fi", "LR=1; if cd /nowhere; then LR=2; fi", "LR=1; mkdir x || LR=2e-6",
        "LR=1; X=$(grep a b) || LR=2", "LR=1; while cp a b; do LR=2; break; done",
        "for i in 1 2; do while [ -f x ]; do if [ -f y ]; then break 2; fi; done; LR=5; done",
        "for i in 1 2; do if [ -f x ]; then break; fi; LR=5; done",
        "if [ -f x ]; then shopt -s nocasematch; fi; LR=1; case A in a) LR=2;; esac",
        "declare -l LR; LR=ABC", "if [ -f x ]; then readonly LR=1; fi; export LR=2",
        "g() { unset LR; }; f() { local LR=1; g; X=$LR; }; LR=5; f; LR=$X",
        "f() { if [ -f x ]; then local LR=5; else LR=7; fi; }; LR=1; f",
        "alias q=x; unset LR; LR=$(q)", "K='LR=5'; \"export\" \"LR=5\"", "read 'A[0]'; LR=${A[0]}",
        "L=([2]=q r); L=x; LR=${L[2]}", "declare -A K=([z]=1 [a]=2); LR=${K[@]}", "V='a b'; [ -n $V ] && LR=1",
        "M=+x; LR=${M[@]:0:1}", "L+=x; LR=${L[-1]}", "f() { local LR; X=$LR; }; LR=1 f; LR=$X",
        "P=x; case y in y) P=y; LR=1;;& $P) LR=2;; *) LR=3;; esac",
        "f() { export LR=3; }; LR=2; LR=1 f", "f() { export LR; LR=4 true; }; LR=1 f",
        "f() { unset LR; }; LR=2; LR=1 f",
        "D=; for i in 1 2 3; do [[ $D = *z ]] && LR=$E; E=5; D+=x$(cat y); done", "set x \"$@$U\"; LR=$#",
        "if [ -f x ]; then f() { LR=5; }; fi; LR=2; f",
        "declare -A K=([z]=1 [a]=2); for LR in \"${!K[@]}\"; do :; done",
        "echo() { :; }; LR=$(echo 5)", "LR=$(echo 5 >&2)",
    ],
)  # fmt: skip
def test_what_is_not_followed_is_not_known(before: str) -> None:
    found = convert(f"{before}\n{RUN} --lr $LR --beta 0.5", gpus=4)
    assert any(name.startswith("--lr ") for name in found.open) and any(
        line.startswith("--lr ") for line in found.assumed
    ), found.assumed
    assert found.config.algorithm.kl_beta == 0.5


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("set -a\nLR=4e-6\nset +a\nSEED=7\n", ("4e-6", "")),
        ("set -o allexport\nLR=4e-6\nset +o allexport\nSEED=7\n", ("4e-6", "")),
        ("LR=4e-6\nexport SEED=7\n", ("", "7")),
    ],
)
def test_what_is_set_under_allexport_is_seen_by_a_shell_that_is_started(before: str, expected: tuple[str, str]) -> None:
    words = read_script(f'{before}bash -c \'a "${{LR:-}}" "${{SEED:-}}"\'')[-1].words
    assert words == ("a", *expected)


@pytest.mark.parametrize(
    "script",
    [
        "[ -f x ] && a",
        '[[ --k=v = "$C" ]] || a',
        "[[ $X =~ ^y ]] && a",
        "(( $(cat x) )) && a",
        "f() { if [ -f x ]; then return; fi; a; }\nf",
        "f() { [ $(cat x) ] && return\na; }\nf",
        "for i in 1 2; do [ -f x ] && break; a; done",
        "if [ -f x ]; then f() { a; }; fi\nf",
        "while read x; do for i in $(cat y)z; do break 2; done; a; done",
        "while read x; do [ $# -gt 0 ] && a; set -- y; done",
    ],
)
def test_a_run_that_depends_on_a_condition_is_not_certain(script: str) -> None:
    found = follow(script)
    assert ("a",) not in [item.words[:1] for item in found.commands]
    assert ("a",) in [item.words[:1] for item in found.possible]


def test_a_run_behind_a_command_that_is_expected_to_work_is_certain() -> None:
    assert [item.words[0] for item in follow("pip install x && a").commands] == ["pip", "a"]


def test_a_local_variable_is_exported_as_the_one_that_it_hides() -> None:
    script = "export A=1\nf() {{ local A{0}; bash -c 'a \"$A\"'; }}\nf"
    assert read_script(script.format("=5"))[-1].words == ("a", "5")
    assert is_unset(read_script(script.format(""))[-1].words[1])


@pytest.mark.parametrize("handed", ["readonly LR=1\nLR=2", "set -n", "shopt -s localvar_inherit", "set -o posix"])
def test_what_changes_how_a_script_is_read_is_refused_with_its_line(handed: str) -> None:
    with pytest.raises(ValueError, match=r"line \d: .*(read-only|take it out)"):
        read_script(handed)


def test_an_alias_that_is_expanded_is_refused_and_another_is_none() -> None:
    with pytest.raises(ValueError, match="line 3: run is an alias"):
        read_script("shopt -s expand_aliases\nalias run='a x'\nrun y")
    assert read_script("alias run='a x'\nrun y")[-1].words == ("run", "y")


def test_a_blank_behind_a_backslash_is_told_with_its_line() -> None:
    found = convert(f"{RUN} --lr 1e-6 \\ \n  --beta 0.5\n", gpus=4)
    assert any("line 1: a blank stands behind the backslash" in line for line in found.assumed)
    assert follow("# a \\ \nb\na x \\\n  y\n").blanks == ()


def test_exec_is_the_launch_and_the_end() -> None:
    script = follow(f"exec {RUN} --lr 1e-6\n{RUN} --lr 2e-6\n")
    assert len(script.commands) == 1


def test_only_a_hook_is_skipped_by_eval() -> None:
    for hook in ('eval "$(conda shell.bash hook)"', 'eval "$(/opt/conda/bin/conda shell.bash hook 2>/dev/null)"'):
        words = read_script(f"LR=1e-6\n{hook}\na $LR")[-1].words
        assert words == ("a", "1e-6")
    assert is_unset(read_script('LR=1e-6\neval "$(cat /opt/conda.txt)"\na "$LR"')[-1].words[1])


@pytest.mark.parametrize(
    "launcher",
    [
        "srun --ntasks=2 bash -c",
        "srun -N 2 -c 4 apptainer exec --nv x.sif bash -lc",
        "docker run --rm img /bin/sh -ec",
        "nohup timeout 5h bash -c",
    ],
)
def test_commands_that_a_launcher_gives_to_a_shell_are_followed(launcher: str) -> None:
    found = convert(f'{launcher} "cd /x && {RUN} --lr 1e-6"\n', gpus=4)
    assert found.config.optimizer.lr == 1e-6
    texts = ["U=5e-6; x $U", "x ${1:-5e-6}", "U=1; U+=2; x $((U))", "x $#", "x $(echo 4)"]
    for text, known in zip(texts, ("5e-6", "7", "12", "1", "4"), strict=True):
        words = follow(f"export U=3e-6 SLURM_PROCID=0\n{launcher} '{text}' 0 7\n").commands[-1].words
        assert words == ("x", known)
    passes = not re.search("apptainer|docker", launcher)
    for text in ("x ${U:-5e-6}", "x $U"):
        words = follow(f"export U=3e-6 SLURM_PROCID=0\n{launcher} '{text}' 0 7\n").commands[-1].words
        assert words == ("x", "3e-6") if passes else is_unset(words[1]), words
    words = follow(f"export SLURM_PROCID=0\n{launcher} 'x ${{SLURM_PROCID:-0}}'").commands[-1].words
    assert words == ("x", "0") if "timeout" in launcher else is_unset(words[1]), words


def test_a_shell_behind_a_launcher_changes_nothing_around_it_and_is_as_certain_as_that() -> None:
    assert read_script("A=1\nset -- p\nsrun bash -c 'A=2; exit'\na $A $1")[-1].words == ("a", "1", "p")
    found = follow("if [ -f x ]; then srun bash -c 'a'; fi")
    assert [item.words for item in found.possible][-1] == ("a",) and not found.commands
    assert follow("srun python x.py bash -c 'a'").commands[-1].words[0] == "srun"


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("bash -c 'A=5; megatron --a $A'", "5"),
        ("A=3 bash -c 'megatron --a $A'", "3"),
        ('A=5\nbash -c "megatron --a $A"', "5"),
        ('A=3 bash -c "megatron --a $A"', None),  # the caller's, which has none
        ('bash -c "A=5; megatron --a $A"', None),
    ],
)
def test_whose_variable_stands_in_the_commands_of_a_shell(text: str, known: str | None) -> None:
    words = [command.words for command in follow(text).commands if command.words[0] == "megatron"]
    assert [one[-1] for one in words if one[-1] in ("3", "5")] == ([] if known is None else [known]), words


def test_a_comment_between_backticks_is_nothing() -> None:
    words = [command.words for command in follow("megatron --a 1 `# the first` \\\n  --b 2 `#x`\n").commands]
    assert words == [("megatron", "--a", "1", "--b", "2")]


@pytest.mark.parametrize(
    ("call", "files"),
    [
        ("source f.sh 4 2", {"f.sh": "set -- 5 6\n"}),
        ("source f.sh 4 2", {"f.sh": "shift\n"}),
        ("source f.sh 4", {"f.sh": "h() { set -- 5 6; }; h 3\n"}),
        ("source f.sh 4", {"f.sh": ". k.sh 8\n", "k.sh": "set -- 3\n"}),
        ("source f.sh 4", {"f.sh": "set -- 3\n. k.sh 8\n", "k.sh": ":\n"}),
        ("source f.sh 4", {"f.sh": ". k.sh\n", "k.sh": "set -- 3\n"}),
        ("source f.sh", {"f.sh": "set -- 3\n. k.sh 8\n", "k.sh": ":\n"}),
        ("source f.sh 4", {"f.sh": "(set -- 3)\n"}),
        ("source f.sh 4", {"f.sh": "set -x; set +x\n"}),
        ("source f.sh 4", {"f.sh": "eval set -- 3\n"}),
        ("g() { source f.sh 4 2; swift $1; }; g 7", {"f.sh": "set -- 5 6\n"}),
    ],
)
def test_arguments_of_a_sourced_file_are_given_back_unless_set_replaces_them(
    call: str, files: dict[str, str], tmp_path: Path
) -> None:
    read, told = given_to_swift(f'set -- 1 2; {call}; swift "$@"\n', tmp_path, files)
    assert read == told and told


@pytest.mark.parametrize(
    ("script", "ends"),
    [
        ('f() { [[ -n "$A" ]] && LR=2e-6; }; f', True),
        ('f() { [[ -n "$A" ]] && LR=2e-6; }; f > /dev/null', True),
        ('f() { [[ -n "$A" ]] && LR=2e-6; }; f || true', False),
        ('f() { [[ -n "$A" ]] && LR=2e-6; }; if f; then :; fi', False),
        ('f() { [[ -n "$A" ]] && LR=2e-6; return 0; }; f', False),
        ('f() { [[ -n "$A" ]] && LR=2e-6; }; set +e; f', False),
        ('A=1; f() { [[ -n "$A" ]] && LR=2e-6; }; f', False),
        ('[[ -n "$A" ]] && LR=2e-6', False),
        ("i=0; ((i++))", True),
        ("i=0; ((++i))", False),
        ("let i=0", True),
        ("! true; false | true", False),
    ],
)
def test_a_call_that_fails_ends_a_script_with_set_e(script: str, ends: bool, tmp_path: Path) -> None:
    text = f"set -e; LR=5e-6; {script}\n{SWIFT} --learning_rate $LR\n"
    _, told = given_to_swift(f"touch told; {text}", tmp_path, {})
    assert not told == ends
    line = "the script ends in line 1 (set -e): what follows is read all the same"
    assert any(line in one for one in convert(text).assumed) == ends


def test_ends_of_lines_of_windows_are_told_where_they_end_commands(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    for end, told in (("\r\n", True), ("\n", False)):
        path.write_bytes(f"{SWIFT} \\{end}  --learning_rate 3e-6{end}".encode())
        found = convert(read_text(path), folder=tmp_path, name="run.sh")
        assert found.config.optimizer.lr == 3e-6
        assert any("end as on Windows (CR LF)" in line for line in found.assumed) == told
