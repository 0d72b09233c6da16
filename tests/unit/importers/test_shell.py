"""Shell scripts are read as bash reads them, and what only running them would tell is reported by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gspo_hpc.importers.convert import convert
from gspo_hpc.importers.scripts.shell import follow, read_script

RUN = "megatron rlhf --rlhf_type grpo --train_iters 5 --num_generations 8 --global_batch_size 32"


@pytest.mark.parametrize(
    "script",
    [
        # case
        "X=big\ncase $X in\n small) N=1 ;;\n b*|huge) N=2 ;;\n *) N=3 ;;\nesac\na $N",
        "case \"$Q\" in\n x) a ;;\n '') b ;;\n *) c ;;\nesac",
        "X=big\ncase $X in\n small|big) a ;;\n *) b ;;\nesac",
        # arithmetic
        "N=3\na $(( 2 * 4 )) $((N*N - 1)) $(((N + 7) / 2)) $((-7 / 2)) $((-7 % 4)) $((N > 1)) $(( $N * ${N} ))",
        "N=3\nif (( N > 2 )); then a; else b; fi",
        # functions, with their arguments and local variables
        'f() {\n a "$@" end $#\n b ${2:-none}\n}\nf 1 "2 3"\nf',
        'X=outer\nfunction f { local X=$1; a "$X"; Y=set; }\nf inner\nb "$X" "$Y"',
        # arrays
        'A=(1 \'two three\')\nA+=("four")\na ${#A[@]} ${A[1]} "${A[1]}" "${A[*]}" "${A[@]}" x${A[0]}y $A',
        'A=()\na "${A[@]}" end',
        # defaults and parts of a value
        'a ${X:-b c} "${X:-b c}" ${X-d} ${X:=e} $X ${X:+set} ${Q:+unset} ${X:-f} "${Z:-}" ${Z:-}',
        "P=/models/Qwen-7B.tar.gz\na ${P##*/} ${P%/*} ${P%%.*} ${P#/} ${P/Qwen/Llama} ${P:1:6} ${P^^} ${#P}",
        "P=a.b.c\na ${P//./-} ${P/./-}\nX=one\nX+=two\nY+=three\nb $X $Y",
        # here-documents, two in one line, and one that goes into a pipe
        'cat <<E >/dev/null | a x\nb it\'s "not" $(a command\nE\nb y',
        "a x <<'E' y <<-'F'\nb $(\nE\n\tc\n\tF\nb z",
        # a backslash before a line's end, within quotes and outside
        "a \"one \\\ntwo\" th\\\nree \\\n  four 'fi\\\nve'",
        "X=1 \\\n  a x \\\n  b  # a comment\nb $'tab\\there' \"a 'b' c\" 'a \"b\" c'",
        # conditions, lists and loops whose outcome the script alone decides
        '[ -z "$Q" ] && X=1 || X=2\na $X\n[[ $X -eq 1 && ! $X == 2* ]] && b\n[ "$X" != 1 ] || c',
        "for x in one; do a $x; done\nfor y; do b; done\nwhile [ $# -gt 0 ]; do c; done",
        "b=/d\na [$b/x,$b/y,./z] q,$b/c --x $b/a.jsonl,$b/b.jsonl x=[$b,$b/y] x=['$b',$b/y] $b=$b,$b",
        "b=/d\nX=$b,$b/c\nY=$b/a,$b/c\na $X $Y x=[$b-1,$b:2,$b+3,$b@4,$b]",
        'b=/d\nA=($b/x,$b/y $b)\na "${A[@]}" $((3 + ${#b})) $(echo $b,$b/c)',
        "(X=1; a $X)\nb ${X:-unset}\n{ X=2; }\nc $X",
        'export P=1 "Q=2 3"\nunset P\na ${P:-gone} $Q "$Q"',
        "a == b =~ - = + 2>&1",
        "a - 2>&1",
        "D=x\nH=y\na $H-$D/r f=$H/c-$D/r.p \"$H-$D/r\" '$H-$D/r' --x=$D/y",
        'T=${T:-["/one"]}\na $T',
        # arguments of functions and of the script, returns and exits
        'f() {\n local n=$1\n shift\n a $n "$@"\n}\nf 1 2 "3 4"',
        'set -- x "y z"\na "$@" $#\nshift\na "$1"',
        'f() { if [ "$1" = x ]; then return; fi; b "$1"; }\nf x\nf y',
        "f() { a; return; b; }\nf\nc",
        "N=2\nif [ $N -gt 1 ]; then a; exit; fi\nb",
        "case x in\n y) exit 1 ;;\n *) N=2 ;;\nesac\na $N",
        'X=5\nf() { local X; a "${X:-empty}"; X=6; }\nf\na $X\ng() { local X=$X; X=7; a $X; }\ng\nb $X',
        # arrays with keys, elements, slices, and names in variables
        "declare -A M=([small]=1 [big]=8)\nM[huge]=64\nK=big\na ${M[big]} ${M[huge]} ${M[$K]} ${#M[@]}",
        'K=(a b)\nK[1]=z\nK[2]=y\na "${K[@]}" ${!K[@]}\nV=N\nN=9\nb ${!V}',
        'A=(1 2 3 4)\na "${A[@]:1:2}" ${A[@]:2} ${A[-1]} ${A[1+1]}',
        # loops whose rounds the script alone decides
        'for i in 1 2 3; do S+="$i,"; L+=(--x$i); done\na "$S" "${L[@]}"',
        "S=\nfor ((i = 0; i < 3; i++)); do S=$S$i; done\na $S $i",
        "S=\ni=0\nwhile [ $i -lt 3 ]; do i=$((i + 1)); [ $i = 2 ] && continue; S=$S$i; done\na $S",
        "S=\nfor i in 1 2 3; do [ $i = 2 ] && break; S=$S$i; done\na $S $i",
        # cases that go on with the next commands, or with the next patterns
        "X=big\ncase $X in\n b*) N=1 ;;&\n small) N=$N-2 ;;\n *g) N=$N-3 ;&\n no) N=$N-4 ;;\n *) N=5 ;;\nesac\na $N",
        "case x in\n y) a 1 ;&\n x) a 2 ;&\n z) a 3 ;;&\n x) a 4 ;;\n *) a 5 ;;\nesac",
        "case x in\n x) a 1 ;;&\n y) a 2 ;&\nesac\nb",
        # text that is read again, other arithmetic, and commands that only write
        'C=\'a "x y" z\'\neval "$C"\neval $C',
        "N=4\na $((N << 1)) $((N > 3 ? 7 : 9)) $((N++)) $N $((N += 2, N * 2)) $((0x10 + 010)) $((2 ** 3 ** 2))",
        'A=2\nB=3\na ${X:-$((A + B))} "${Y:-$((A * B))}" ${Z:-$(((A + 1) * 2))}',
        "let X=2+3 Y=X*2\na $X $Y\nN=3\nif (( N % 2 && X )); then b; fi",
        'a "$(echo one two)" $(echo one two) $(basename /m/Qwen.sh .sh) $(dirname /m/q/x)\nprintf -v X %s y\nb $X',
        "declare -i D=4+4\nD+=2\na $D\nD=D*3\nb $D\nE=1\nE+=2\nc $E\nf() { local -i G=7/2; b $G; }\nf",
        "f() { Z=3; X=4; }\nX=1\nX=2 f\na $X $Z",
        "N=`expr 4 + 4`\na $N $(expr $N \\* 2 - 1) $(expr 7 / 2)",
        # functions whose output is used
        "N=2\ngpus() { echo $((N * 8)); }\nX=$(( $(gpus) * 8 ))\na $X n=$(gpus) ${Z:-$(( $(gpus) + 1 ))} `gpus`",
        'f() { echo "$1"  $((${2:-3} * 2)); }\na "$(f "p  q" 4)" $(f p)\nfor i in $(f "1 2" 3); do S+=$i,; done\nb $S',
        "f() { printf '%s' \"$*\" z; }\ng() { printf '%s\\n' $(f $1) \"$#\"; }\na \"$(g 'x y' 2)\" $(f)",
        "f() ( echo 8 )\ng() { echo 4; }\nN=1\nif [ $(f) -gt $(g) ]; then N=$(f); fi\ng() { echo $N$N; }\na $N $(g)",
        'f() { echo ${N:=5} $1; }\nIFS=,\na $(f 1,2) "$(f 3)"\nset -- 6 7\nb $(f $2) $1',
        "f() { echo 8; }\nfor i in 1 2; do S+=$(f)x; f() { echo 16; }; done\na $S $(f)",
        'a "$(echo -- x)" "$(echo -n y -n)" "$(echo -5)" "$(printf "%s-%%\\n" 1 2)"',
        'test "$Q" = "" && a\n[ -v Q ] || b\nexec 2>&1\ntest -n "$Q" || c',
    ],
)
def test_a_script_is_read_as_bash_reads_it(script: str) -> None:
    tell = "".join(f"{name}() {{ printf '%s\\0' {name} \"$@\" >&3; printf '\\1\\0' >&3; }}\n" for name in "abc")
    done = subprocess.run(
        ["bash", "-c", f"exec 3>&1\n{tell}{script}"], capture_output=True, text=True, timeout=20, check=False, env={}
    )
    commands = [tuple(part.split("\0")[:-1]) for part in done.stdout.split("\1\0")[:-1]]
    assert commands and [item.words for item in read_script(script) if item.words[0] in "abc"] == commands


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ("if [ -f /etc/x ]; then LR=1e-6; else LR=2e-6; fi", "$LR depends on a condition in line 1"),
        ("LR=1e-6\n[ -d /x ] && LR=2e-6", "$LR depends on a condition in line 2"),
        ("LR=1e-6\nnvidia-smi || LR=2e-6", "$LR depends on a condition in line 2"),
        ("case $(hostname) in\n a*) LR=1e-6 ;;\n *) LR=2e-6 ;;\nesac", "$LR depends on a condition in line 1"),
        ("LR=1e-6\ncase $(hostname) in a*) LR=2e-6 ;; esac", "$LR depends on a condition in line 2"),
        ("LR=1e-6\nf() { if grep x y; then LR=1e-5; fi; }\nf", "$LR depends on a condition in line 2"),
        ("LR=1e-6\nwhile read line; do LR=$line; done < file", "$LR changes in the loop of line 2"),
        ("read -r LR", "$LR is read from the input by read"),
        ('LR=1e-6\nIFS=, read -t 9 LR <<< "5e-6"', "$LR is read from the input by read"),
        ('LR=1e-6\nif [ "$USER" = root ]; then LR=2e-6; fi', "$LR depends on a condition in line 2"),
        ("LR=1\n(( LR = N++ ))", "$LR is computed in line 2"),
        ("LR=1e-6\nsource env.sh", "$LR may be set by env.sh, a file that the script sources"),
        (". ./env.sh", "$LR may be set by ./env.sh, a file that the script sources"),
        ("LR=$(cat lr.txt)", "its value is known only when the script runs"),
        ("LR=`cat lr.txt`", "its value is known only when the script runs"),
        ("lr() { cat lr.txt; }\nLR=$(lr)", "--lr $(lr): it calls the function lr, whose output is not followed"),
        (
            "lr() { local n=1; n=2; echo $n; }\nLR=$(( $(lr 2) * 8 ))",
            "it calls the function lr, whose output is not followed",
        ),
        ("lr() { cat x; }\nLR=$(echo $(lr))", "it calls the function lr, whose output is not followed"),
        (
            "lr() { echo $((N * 8)); }\nLR=$(( $(lr) * 8 ))",
            "it calls the function lr, in which $N is not set in the script",
        ),
        (
            "[ -f x ] && N=1\nlr() { echo $N; }\nLR=$(lr)",
            "the function lr, in which $N depends on a condition in line 1",
        ),
        (
            "[ -f x ] && N=1\nlr() { echo $1; }\nLR=$(lr $N)",
            "the function lr, in which $N depends on a condition in line 1",
        ),
        ("lr() { echo 1; }\nwhile read x; do lr() { echo 2; }; done < x\nLR=$(lr)", "it calls the function lr, whose"),
        ("lr() { echo 1; }\n[ -f x ] && lr() { echo 2; }\nLR=$(lr)", "it calls the function lr, whose output"),
        ("lr() { echo 1; }\nsource env.sh\nLR=$(lr)", "it calls the function lr, whose output is not followed"),
        ("f() { [ -f x ] && return; lr() { echo 1; }; }\nlr() { echo 2; }\nf\nLR=$(lr)", "it calls the function lr"),
        ("lr() { echo 1; }\nreadonly -f lr\nlr() { echo 2; }\nLR=$(lr)", "it calls the function lr, whose output"),
        ("shopt -s expand_aliases\nlr() { echo 1; }\nLR=$(lr)", "it calls the function lr, whose output"),
        ("set -T\ntrap 'echo 1' DEBUG\nlr() { echo 2; }\nLR=$(lr)", "it calls the function lr, whose output"),
        ("lr() { echo 1; } > log\nLR=$(lr)", "it calls the function lr, whose output is not followed"),
        ("lr() { echo $(lr)$(lr); }\nLR=$(lr)", "it calls the function lr, whose output is not followed"),
        ("LR=$(cd x || pwd)", "its value is known only when the script runs"),
        ("LR=$(echo 1 <<< 2)", "its value is known only when the script runs"),
        ("LR=$(echo 12>/dev/null)", "its value is known only when the script runs"),
        ("LR=$((N ** 3))", "its value is known only when the script runs"),
        ("LR=$RATE", "$RATE is not set in the script"),
        ("LR=1e-6\nif [ $USER = root ]; then LR=2e-6; fi", "$LR depends on a condition in line 2"),
        ('LR=1e-6\n[[ -n "$HOSTNAME" ]] && LR=2e-6', "$LR depends on a condition in line 2"),
        ("LR=1e-6\ncase $HOME in /root) LR=2e-6 ;; esac", "$LR depends on a condition in line 2"),
        ("LR=${UID:-1e-6}", "$UID is set by the shell"),
        ("LR=${SHELL:+1e-6}", "$SHELL is set by the shell"),
        ("declare -i LR=NODES*2", "$LR is changed in line 1 in a way"),
        ("declare -l LR=1E-6", "$LR is declared in line 1 with letters that are changed"),
        ("declare -A R=([x]=1e-6)\nLR=${R[$Q]}", "$R is an array, and which of its elements is meant is not known"),
        ("R=([5]=1e-6)\nLR=${R[5]}", "$R is an array with keys"),
    ],
)
def test_what_depends_on_more_than_the_script_is_reported_by_name(before: str, why: str) -> None:
    found = convert(f"{before}\n{RUN} --lr $LR", gpus=4)
    lines = [line for line in found.assumed if line.startswith("--lr ")]
    assert len(lines) == 1 and why in lines[0], found.assumed
    assert found.config.optimizer.lr == 1e-5  # the default of Megatron-SWIFT, and the line says so


def test_defaults_after_a_sourced_file_are_not_taken_for_granted() -> None:
    found = convert(f"source env.sh\n{RUN} --lr ${{LR:-1e-6}}", gpus=4)
    assert any("$LR may be set by env.sh" in line for line in found.assumed)
    known = convert(f"source /opt/venv/bin/activate\n{RUN} --lr ${{LR:-1e-6}}", gpus=4)  # sets PATH, and no argument
    assert known.config.optimizer.lr == 1e-6 and not any("$LR" in line for line in known.assumed)


def test_branches_that_agree_leave_a_variable_known() -> None:
    found = convert(f"if [ -f x ]; then LR=1e-6; B=1; else B=2; LR=1e-6; fi\n{RUN} --lr $LR", gpus=4)
    assert found.config.optimizer.lr == 1e-6 and found.assumed == convert(RUN, gpus=4).assumed


def test_a_loop_over_several_values_converts_with_that_argument_open() -> None:
    found = convert(f"for rate in 1e-6 2e-6; do\n{RUN} --lr $rate --beta 0.5\ndone", gpus=4)
    assert any("--lr $rate: $rate takes several values in the loop of line 1" in line for line in found.assumed)
    assert found.config.algorithm.kl_beta == 0.5


def test_a_run_behind_a_condition_is_converted_with_a_note() -> None:
    script = follow(f"if [ -f x ]; then\n{RUN}\nfi")
    assert script.commands == [] and len(script.possible) == 1
    found = convert(f"if [ -f x ]; then\n{RUN}\nfi", gpus=4)
    assert any(line.startswith("the run stands behind a condition") for line in found.assumed)
    with pytest.raises(ValueError, match="it starts 2 runs"):
        convert(f"if [ -f x ]; then\n{RUN}\nelse\n{RUN}\nfi")


def test_machines_that_the_script_computes_are_reported() -> None:
    found = convert(f"NPROC_PER_NODE=$(nvidia-smi -L | wc -l) NNODES=$SLURM_NNODES {RUN}")
    assert any(line.startswith("NPROC_PER_NODE=$(nvidia-smi...)") for line in found.assumed)
    assert any("$SLURM_NNODES is not set in the script" in line for line in found.assumed)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("a\nb 'c\nd", "line 2: a quote (') is opened and never closed: ...a b 'c d"),
        ('a "x"\nb\nc "it\'s', 'line 3: a quote (") is opened and never closed'),
        ("a\nb <|x|> c", "line 2: < leads to no file: put quotes around text with < > | & ;"),
        (
            "a\n<<<<<<< HEAD\nb\n=======\nc\n>>>>>>> theirs\n",
            "line 2: <<<<<<< HEAD begins a conflict of a merge: keep one",
        ),
        ("a\nif b; then c", "line 2: this cannot be parsed as bash"),
        ("a\nb )", "line 2: this cannot be parsed as bash"),
        ("a\n\nb \0 c", "line 3: a NUL byte stands here"),
        ("a " + "x" * (1 << 20), "the script has 1048578 characters; at most 1048576 are read"),
        ("X=ab\n" + "X=$X$X\n" * 30, "line 17: the value of X has more than 65536 characters"),
        ("f0() { a; }\n" + "".join(f"f{i}() {{ f{i - 1}; f{i - 1}; }}\n" for i in range(1, 16)) + "f15", "statements"),
        ("( " * 3000 + "b" + " )" * 3000, "nested too deeply"),
    ],
)
def test_what_is_no_script_is_refused_in_one_line(script: str, expected: str) -> None:
    with pytest.raises(ValueError) as refused:
        read_script(script)
    assert expected in str(refused.value) and len(str(refused.value).splitlines()) == 1


def test_a_backslash_at_the_end_of_the_text_continues_nothing() -> None:
    for end in ("\\", "\\\n", "\\ \n\n"):  # bash -c alone would take the first for a word
        assert read_script(f"a x {end}")[0].words == ("a", "x")


def test_recursion_of_functions_ends() -> None:
    assert read_script("f() { a; f; }\nf")[0].words == ("a",)


@pytest.mark.parametrize(("name", "modules"), [("run.sh", "tree_sitter"), ("run.yaml", "")])
def test_the_parser_is_imported_for_shell_scripts_alone(name: str, modules: str, tmp_path: Path) -> None:
    text = {"run.sh": RUN, "run.yaml": "rlhf_type: grpo\nglobal_batch_size: 32\ntrain_iters: 5\n"}[name]
    (tmp_path / name).write_text(text)
    script = (
        "import sys\nfrom gspo_hpc.cli.main import main\n"
        f"assert main(['convert', {str(tmp_path / name)!r}, '--gpus', '4']) == 0\n"
        "print('tree_sitter' * ('tree_sitter' in sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.splitlines()[-1] == modules


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_standard_input_that_is_not_utf_8_is_refused_in_one_line(locale: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gspo_hpc", "convert", "-"],
        input=RUN.encode() + b" --model /m\xff",
        env={"PATH": "/usr/bin:/bin", "LC_ALL": locale, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and done.stdout == b""
    assert done.stderr.startswith(b"error: -: not UTF-8 text") and done.stderr.count(b"\n") == 1
