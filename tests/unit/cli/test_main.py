"""The command line: what it prints, what it refuses, its exit codes, and that it stays light."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_hpc import __version__
from gspo_hpc.cli import commands
from gspo_hpc.cli.main import main
from gspo_hpc.cli.parser import COMMANDS, FOLDERS, MODULES, parser_of
from gspo_hpc.config import paths
from gspo_hpc.config.loader import from_dict
from gspo_hpc.runs.directory import open_run

VALID = """
run: {max_steps: 8}
cluster: {nodes: 2, gpus_per_node: 8}
parallel: {tensor_model_parallel_size: 2}
batch: {micro_batch_size: 1, global_batch_size: 32, steps_per_generation: 2, num_generations: 4}
"""
HEAVY = ("torch", "vllm", "megatron", "wandb", "transformers", "numpy", "pyarrow", "rich", "submitit")


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(VALID)
    return str(path)


def gspo_hpc(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own."""
    command = [sys.executable, "-m", "gspo_hpc", *words]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | (env or {}), timeout=60, check=False
    )


def test_plan_page_of_a_valid_config(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", config]) == 3
    page = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in page.splitlines()]
    assert " ".join(page.split()).startswith(f"plan of {config}: what is given is valid; a run needs more Layout")
    assert "ranks TP 2 x PP 1 x CP 1 x DP 8 = 16" in lines
    assert "num_rollout_prompts 16 prompts per rollout" in lines
    assert "update micro_batch_size 1" in lines and "old_logprobs micro_batch_size 1" in lines
    assert "reference not needed: kl_beta is 0" in lines
    assert "\033" not in page and "Broken rules" not in page and "Warnings" not in page
    assert "A run also needs: model.path, data.train, reward.functions." in " ".join(lines)
    numbers = [line for line in page.splitlines() if line.startswith("  num_") or line.startswith("  global")]
    ends = {line.index("  ", line.index(line.split()[1])) for line in numbers}
    assert len(ends) == 1  # numbers are aligned on the right


def test_each_pass_shows_its_own_size(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["batch.logprob_micro_batch_size=3", "batch.reference_micro_batch_tokens=4096", "algorithm.kl_beta=0.1"]
    assert main(["plan", config, *sizes]) == 3
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert {"update micro_batch_size 1", "old_logprobs micro_batch_size 3", "reference micro_batch_tokens 4,096"} <= {
        *lines
    }


def test_plan_refuses_with_every_broken_rule(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", config, "batch.global_batch_size=16", "algorithm.aggregation=token"]) == 2
    page = " ".join(capsys.readouterr().out.split())
    assert f"plan of {config}: 2 broken" in page
    assert "update_prompts_reach_every_dp_group num_prompts_per_dp_group (0.5) must be at least 1" in page
    assert "objective_consistent algorithm.aggregation token contradicts" in page
    size, kind = r"batch\.\w+=\d+", r"algorithm\.aggregation"
    assert re.search(rf"Fixes .* {size} {kind}=sequence now {size}, {kind}=token", page), page
    assert main(["plan", config, "batch.global_batch_size=16", "--json"]) == 2
    (fix, *_) = json.loads(capsys.readouterr().out)["fixes"]
    assert fix == [{"key": "batch.global_batch_size", "before": 16, "value": 32}]


def test_plan_as_json_wherever_the_flag_stands(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", config, "--json", "batch.steps_per_generation=1"]) == 3
    first = capsys.readouterr().out
    assert main(["plan", "--json", config, "batch.steps_per_generation=1"]) == 3
    assert capsys.readouterr().out == first
    plan = json.loads(first)
    assert plan["valid"] is True and plan["quantities"]["num_rollout_prompts"] == 8
    assert "clipping is inert" in plan["warnings"][0]
    assert main(["plan", config, "--json", "batch.num_generations=1"]) == 2
    assert json.loads(capsys.readouterr().out)["valid"] is False


def test_plan_counts_the_rows_of_a_jsonl_file(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n\n' * 20)
    assert main(["plan", config, f"data.train={rows}", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["quantities"]["num_rows"] == 20
    rows.write_text('{"prompt": "a"}\n' * 15)
    assert main(["plan", config, f"data.train={rows}"]) == 2
    assert "the training data has 15 prompts" in capsys.readouterr().out
    assert main(["plan", config, f"data.train={tmp_path}/rows.parquet", "--json"]) == 3
    assert "num_rows" not in json.loads(capsys.readouterr().out)["quantities"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["pln"], "no command 'pln'; nearest: plan"),
        (
            ["xyzzy"],
            "known: init, plan, suggest, keys, convert, doctor, schema, completion, try, train, submit, status",
        ),
        (["plan"], "required: CONFIG"),
        (["plan", "CONFIG", "--jsno"], "nearest: --json"),
        (["--versoin"], "nearest: --version"),
        (["plan", "CONFIG", "run.max_step=3"], "error: command line: unknown key run.max_step; nearest: run.max_steps"),
        (["plan", "CONFIG", "run.max_steps"], "write section.key=value"),
        (["plan", "run.max_steps=3"], "the config file comes first"),
        (["plan", "CONFIG.yml"], "no such config file; nearest: CONFIG"),
        (["train", "CONFIG", "batch.global_batch_size=x"], "batch.global_batch_size must be a whole number; found 'x'"),
        (["export", "FOLDER"], "required: --out"),
        (["export", "FOLDER", "--out", "x", "--step", "last"], "invalid int value: 'last'"),
        (["export", "FOLDER/runn", "--out", "x"], "no such run directory; nearest: FOLDER/run-1\n"),
        (["export", "FOLDER/zzzqq", "--out", "x"], "FOLDER/zzzqq: no such run directory\n"),  # run-1 is not like it
        (["report", "FOLDER/nothing/there"], "no such run directory"),
        (["eval", "FOLDER/nothing/there"], "no such config, run directory or model folder"),
        (["eval", "FOLDER"], "FOLDER: neither a run directory (it has no run.json) nor the folder of a model"),
        (["train", "CONFIG", "--optimizer.lr=1e-4"], "--optimizer.lr=1e-4; write optimizer.lr=1e-4, without dashes"),
        (["train", "CONFIG", "--optimizer.lr", "1e-4"], "; write optimizer.lr=VALUE, without dashes"),
        (["train", "CONFIG", "--learning_rate", "1e-4"], "; write optimizer.lr=VALUE, without dashes"),
        (["plan", "CONFIG", "--zzz=1"], "; settings are written section.key=value, and gspo-hpc keys WORD finds them"),
    ],
)
def test_mistakes_are_explained_and_refused(
    words: list[str], expected: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def real(text: str) -> str:
        return text.replace("CONFIG.yml", config[:-5] + ".yml").replace("FOLDER", str(Path(config).parent))

    (Path(config).parent / "run-1").mkdir()  # a file that is more alike, run.yaml, is no run directory
    given = [real(word) if word != "CONFIG" else config for word in words]
    expected = real(expected) if "required" in expected else real(expected).replace("CONFIG", config)
    assert main(given) == 2
    output = capsys.readouterr()
    assert expected in output.err
    assert "Traceback" not in output.err and output.out == ""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["plan"], "gspo-hpc plan: the following arguments are required: CONFIG"),
        (["suggest", "--json"], "gspo-hpc suggest: the following arguments are required: CONFIG"),
        (["plan", "CONFIG", "--price", "x"], "gspo-hpc plan: argument --price: invalid float value: 'x'"),
        (["plan", "CONFIG", "--price"], "gspo-hpc plan: argument --price: expected one argument"),
        (["doctor", "--nodes", "x"], "gspo-hpc doctor: argument --nodes: invalid int value: 'x'"),
        (["suggest", "CONFIG", "--limit", "1.5"], "gspo-hpc suggest: argument --limit: invalid int value: '1.5'"),
    ],
)
def test_no_hint_at_an_option_that_is_right(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.splitlines()[0] == expected


def test_the_nearest_choice_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "x", "--from", "vrl"]) == 2
    assert capsys.readouterr().err.splitlines()[0].endswith("; nearest: verl")
    assert main(["completion", "bsh"]) == 2
    assert capsys.readouterr().err.splitlines()[0].endswith("; nearest: bash")
    assert main(["convert", "x", "--from", "nemo"]) == 2
    assert "nearest" not in capsys.readouterr().err


def test_what_the_system_refuses_has_failed_and_is_no_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever retries on exit code 1 and gives up on 2 must be able to tell them apart."""
    run, _ = open_run(from_dict({"run": {"dir": str(tmp_path / "run")}}))
    assert main(["report", str(run.path), "--out", "/sys/page.html"]) == 1  # not even root may write there
    assert "Permission denied" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none")]) == 2


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gspo-hpc {__version__}\n"
    assert main(["--help"]) == 0
    top = capsys.readouterr().out
    for command in ("plan", "train", "eval", "export", "report", "convert"):
        assert f"    {command} " in top
        assert main([command, "--help"]) == 0
        page = capsys.readouterr().out
        assert page.startswith(f"usage: gspo-hpc {command}")
        assert f"examples:\n  gspo-hpc {command} " in page
    assert "75" in top  # exit codes are told


def folder_of(command: str) -> str:
    """The package that a command lies in."""
    return next(f"gspo_hpc.cli.commands.{folder}" for folder, names in FOLDERS.items() if command in names)


LIGHT = ("yaml", "pydantic", "argcomplete", "difflib", *HEAVY)


@pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_imports_next_to_nothing(words: list[str]) -> None:
    code = "import sys\nfrom gspo_hpc.cli.main import main\nassert main(sys.argv[1:]) == 0\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, check=True)
    modules = done.stdout.splitlines()[-1].split()
    assert "gspo_hpc.cli.parser" in modules
    assert [name for name in modules if name.split(".")[0] in LIGHT] == []
    commands = [name for name in modules if name.startswith("gspo_hpc.cli.commands.")]
    expected = [
        part for name in words[:-1] for part in (folder_of(name), f"{folder_of(name)}.{MODULES.get(name, name)}")
    ]
    assert commands == expected


def test_every_command_has_a_file_of_its_own() -> None:
    found = {path.relative_to(Path(commands.__file__).parent) for path in Path(commands.__file__).parent.glob("*/*.py")}
    expected = {
        Path(folder, f"{name}.py")
        for folder, names in FOLDERS.items()
        for name in ("__init__", *(MODULES.get(name, name) for name in names))
    }
    assert found == expected


def test_the_program_itself(config: str) -> None:
    done = gspo_hpc("plan", config, "run.name=other")
    assert (done.returncode, done.stderr) == (3, "")
    refused = gspo_hpc("plan", config, "run.nmae=other")
    assert refused.returncode == 2 and refused.stdout == ""
    assert refused.stderr.splitlines() == ["error: command line: unknown key run.nmae; nearest: run.name"]
    traced = gspo_hpc("plan", config, "run.nmae=other", env={"GSPO_HPC_DEBUG": "1"})
    assert "Traceback" in traced.stderr and "ConfigError" in traced.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])  # the pipe breaks at the end, or while printing
@pytest.mark.parametrize(
    "words",
    [["plan", "CONFIG"], ["plan", "CONFIG", "batch.num_generations=1"], ["--help"], ["convert", "-"], ["plan", "-h"]],
)
def test_a_closed_pipe_ends_quietly(config: str, words: list[str], unbuffered: str) -> None:
    """As tools end that SIGPIPE ends: no traceback, and no code that says that the command failed."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "gspo_hpc", *(config if word == "CONFIG" else word for word in words)]
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    given = b"megatron rlhf --rlhf_type grpo --global_batch_size 8 --num_generations 8" if "-" in words else b""
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, input=given, env=env, timeout=60, check=False)
    os.close(write)
    assert b"Traceback" not in done.stderr and b"BrokenPipe" not in done.stderr, done.stderr
    argparses_own = unbuffered and words[-1] in ("--help", "-h")  # which it prints without looking whether it can,
    ignores = "(AttributeError, OSError)" in inspect.getsource(argparse)  # except for older releases of Python
    assert done.returncode == (0 if argparses_own and ignores else 141)


def test_a_missing_library_is_named(config: str) -> None:
    """`report` and `train` need parts that are not installed on every login node."""
    script = (
        "import sys\nfrom gspo_hpc.cli.main import main\nfrom gspo_hpc.cli.commands.runs import export\n"
        "def run(args):\n    import a_library_that_is_not_here\n"
        "export.run = run\nsys.exit(main(['export', 'x', '--out', 'y']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert (
        done.stderr
        == "error: a_library_that_is_not_here is not installed here; install gspo_hpc[cpu] or gspo_hpc[gpu]\n"
    )


def test_colour_only_on_a_terminal(config: str) -> None:
    def on_a_terminal(**env: str) -> bytes:
        ours, theirs = os.openpty()
        command = [sys.executable, "-m", "gspo_hpc", "plan", config]
        environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
        environment |= {"TERM": "xterm"} | env
        process = subprocess.Popen(command, stdout=theirs, env=environment)
        os.close(theirs)
        seen = b""
        try:
            while part := os.read(ours, 65536):
                seen += part
        except OSError:  # the other end is closed
            pass
        os.close(ours)
        assert process.wait(60) == 3
        return seen

    assert b"\033[33mwhat is given" in on_a_terminal()
    assert b"\033" not in on_a_terminal(NO_COLOR="1")
    assert b"\033" not in on_a_terminal(TERM="dumb")


@pytest.mark.parametrize("content", ["", "# nothing yet\n", "{}\n", "run:\nbatch: {}\n"])
def test_a_config_without_any_key_is_refused_in_one_line(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(content)
    for given in (str(path), "/dev/null") if not content else (str(path),):
        assert main(["plan", given]) == 2
        output = capsys.readouterr()
        assert output.out == "" and len(output.err.splitlines()) == 1
        assert output.err.startswith(f"error: {given}: the config is empty; ") and "tiny_cpu" in output.err
    assert main(["plan", str(path), "batch.steps_per_generation=4"]) == 3  # a partial config can be planned


def test_the_name_of_the_nearest_preset_can_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "tiny_cpuu"]) == 2
    assert capsys.readouterr().err == "error: tiny_cpuu: no such config file; nearest: tiny_cpu\n"
    (tmp_path / "mine.yaml").write_text("run: {seed: 1}\n")
    assert main(["plan", "mien.yaml"]) == 2
    assert capsys.readouterr().err == "error: mien.yaml: no such config file; nearest: mine.yaml\n"


@pytest.mark.parametrize(
    "words",
    [["plan", "tiny_cpu", "batch.num_generations=x"], ["suggest", "no_such"], ["status", "no_such"], ["pln"]],
)
def test_errors_are_an_object_for_json(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A script that reads --json would fail on empty output, without the reason."""
    assert main([*words, "--json"]) == 2
    told = capsys.readouterr()
    begin = "gspo-hpc" if words == ["pln"] else "error"
    assert told.err.splitlines() == [f"{begin}: {line}" for line in json.loads(told.out)["errors"]]
    assert json.loads(told.out)["errors"]


@pytest.mark.parametrize("words", [["plan", "--json"], ["plan", "tiny_cpu", "--json", "--price", "x"]])
def test_words_that_mean_nothing_are_an_object_too(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    told = capsys.readouterr()
    (line,) = json.loads(told.out)["errors"]
    assert line.startswith("gspo-hpc plan: ") and told.err.splitlines()[0] == line and "usage:" in told.err
    assert main([word for word in words if word != "--json"]) == 2
    assert capsys.readouterr().out == ""


# A command as messages give it whole: with a word that stands for something, and what follows.
NAMED = re.compile(r"gspo-hpc ([a-z]+)( [A-Z]{2,}(?: (?:[A-Z]{2,}|N|--?[a-z][\w-]*))*)")


def named_commands() -> list[str]:
    """Return the commands in texts of the package that have arguments, as they stand there.

    Every worker of the tests does so before it begins: a file is parsed only if the first word of one may stand in it.
    """
    found = set()
    for path in paths.PACKAGE.rglob("*.py"):
        if "gspo-hpc" not in path.read_text("utf-8"):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {match.group() for match in NAMED.finditer(" ".join(node.value.split()))}
    return sorted(found)


@pytest.mark.parametrize("named", named_commands())
def test_a_command_that_a_message_names_has_all_that_it_needs(named: str) -> None:
    match = NAMED.fullmatch(named)
    assert match is not None
    words = ["3" if word == "N" else word for word in match[2].split()]
    parsed, over = parser_of(match[1]).parse_known_intermixed_args(words)
    assert over == [] and parsed is not None


def test_messages_name_commands() -> None:
    assert {"gspo-hpc logs RUN --errors", "gspo-hpc export RUN --step N --out DIR"} <= set(named_commands())
