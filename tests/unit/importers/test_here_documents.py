"""Here-documents whose text becomes the arguments of a run, and defaults of arrays, are what bash makes of them.

Each script is also run by bash, with a function in the place of the program. It would catch arguments that are lost or
read with another text. It takes about a second.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gspo_hpc.importers.convert import convert
from gspo_hpc.importers.scripts.expansion.splitting import Open
from gspo_hpc.importers.scripts.shell import follow

_STUB = 'swift() { printf "%s\\0" "$@"; }\n'


def in_bash(text: str) -> tuple[str, ...]:
    """Return the words that bash gives to swift."""
    done = subprocess.run(["bash", "-c", _STUB + text], capture_output=True, text=True, timeout=20, check=False)
    return tuple(done.stdout.split("\0")[:-1])


def read(text: str) -> tuple[str, ...]:
    """Return the words of the one command that is started, without its name."""
    (command,) = [command for command in follow(text, Path(), "x.sh").commands if command.words[0] == "swift"]
    return command.words[1:]


@pytest.mark.parametrize(
    "text",
    [
        "A=$(cat <<X\n--lr $LR\n--beta 0.1 \\\n--epochs 3\nX\n)\nswift $A",
        "A=$(cat <<'X'\n--lr $LR\n--beta 0.1\nX\n)\nswift $A",
        'A="$(cat <<X\n--name "$LR b" \\"c\\" it\'s \\$LR `echo 5`\nX\n)"\nswift $A "$A"',
        "A=$(cat - <<-X\n\t--lr ${LR}\n\t--beta $((1 + 2))\n\tX\n)\nswift $A last",
        "A=$(cat <<-X\n\ta\n\t\tb\n\tX\n)\nswift \"$A\"",
        "A=$(cat <<X\n\ta\n\t\tb\nX\n)\nswift \"$A\"",
        "swift $(cat <<X\n--lr $LR\nX\n) --beta 1",
        "f() {\n  local A=$(cat <<X\n--lr $1\nX\n)\n  swift $A\n}\nf 7",
        "A=$(cat <<X\n--lr 1\nX\n)\nB=$(cat <<Y\n$A --beta 2\n\n\nY\n)\nswift $B \"$B\"",
        "read -r -d '' A <<X || true\n  --lr $LR\n--beta 0.1\n\nX\nswift $A \"$A\"",
        "read -r -d '' A <<'X'\n--lr $LR \\d\nX\nswift $A",
        "read -d '' -r A <<X\n--lr 1\nX\nswift $A",
        "read -rd '' A <<X\n--lr 1\nX\nswift $A",
        "IFS= read -r -d '' A <<X\n --lr 1\n\nX\nswift \"$A\"",
        "B=1; read -r -d '' A <<X\n--lr $B\nX\nswift $A",
        "set -u; read -r -d '' A <<X || true; B=2\n--lr 1\nX\nswift $A --beta $B",
        "true && read -r -d '' A <<X\n--lr $LR\nX\nswift $A",
        "read -r -d '' A <<X; read -r -d '' B <<Y\n--lr 1\nX\n--beta 2\nY\nswift $A $B",
        "if true; then read -r -d '' A <<X; fi\n--lr 1\nX\nswift $A",
        "f() { read -r -d '' A <<X; swift $A; }\n--lr $1\nX\nf 3",
        "A=(\"\" 1)\nswift ${A[@]:-9} ${A[@]:+8}",
        "A=(2 3)\nswift ${A[@]:-9} \"${A[@]:-9}\" ${A[@]:+8} ${A[@]-7}",
        "A=()\nswift ${A[@]:-9} ${A[@]:+8} ${A[@]-7}",
    ],
)  # fmt: skip
def test_words_are_those_of_bash(text: str) -> None:
    text = f"LR=2e-6\n{text}\n"
    assert read(text) == in_bash(text) != ()


@pytest.mark.parametrize(
    "text",
    [
        "A=$(cat <<X\n--lr $(date +%N)\nX\n)\nswift $A",
        "A=$(tac <<X\n--lr 1\nX\n)\nswift $A",
        "A=$(cat <<X | tr a b\n--lr 1\nX\n)\nswift $A",
        "cat() { echo other; }\nA=$(cat <<X\n--lr 1\nX\n)\nswift $A",
        "read -r A <<X\n--lr 1\n--beta 1\nX\nswift $A",
        "read -d '' A <<X\n--lr 1\\\\t\nX\nswift $A",
        "read -r -d '' A B <<X\n--lr 1\nX\nswift $A",
        "read -r -d x A <<X\n--lr 1 x\nX\nswift $A",
        "read -r -d '' A <<X\n--lr 1\nX\nread A\nswift $A",
    ],
)
def test_what_is_not_followed_is_not_known(text: str) -> None:
    found = [word for word in read(f"{text} --beta 1\n") if word not in ("--beta", "1", "--lr")]
    assert found and all("$" in word for word in found)


@pytest.mark.parametrize(
    "before",
    [
        "mkdir -p c; ",
        "mkdir -p c && ",
        "mkdir -p c && mkdir -p d && ",
        "false || ",
        "cd . ; { ",
        "true || exit; ",
        "if [ -n a ]; then ",
        "echo a & ",
    ],
)
def test_a_file_that_is_written_behind_another_command_is_read(before: str) -> None:
    after = {"{ ": "; }", "then ": "; fi"}.get(before.split(";")[-1].lstrip(), "")
    for writes in ("cat > run.yaml <<X", "cat <<X > run.yaml", "cat <<X | tee run.yaml", "tee run.yaml <<X >/dev/null"):
        text = f"{before}{writes}{after}\nnum_generations: 4\nlearning_rate: 2e-6\nX\ntrl grpo --config run.yaml\n"
        assert convert(text, gpus=1).config.optimizer.lr == 2e-6, text


def test_an_array_of_empty_elements_has_a_default_that_is_not_certain() -> None:
    for text in ('A=("" "")', 'A=("")', 'X=$(date)\nA=("$X")', 'X=$(date)\nA=("" "$X")'):
        for sign in (":-9", ":+8"):
            (word,) = read(f"{text}\nswift ${{A[@]{sign}}}\n")
            assert isinstance(word, Open) and word == f"${{A[@]{sign}}}", (text, sign)


def test_a_run_whose_arguments_stand_in_a_here_document_is_converted() -> None:
    words = "--rlhf_type grpo\n--num_generations 4\n--learning_rate $LR\n--beta $(beta)"
    for how in (f"A=$(cat <<X\n{words}\nX\n)", f"read -r -d '' A <<X\n{words}\nX"):
        found = convert(f"LR=2e-6\n{how}\nswift rlhf $A --max_steps 5\n", gpus=1)
        assert found.config.optimizer.lr == 2e-6 and found.config.run.max_steps == 5
        assert found.open == ("--beta $(beta)",)
