"""Facts that stand in one place of the package: exit codes, variables, nearest names, ends of logs, sizes, names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gspo_hpc.system import environment, exit_codes

HOMES = {
    r"get_close_matches": "system/text.py",
    r"1e9, \"G\"|\"M\"\), \(1e4": "system/text.py",  # prefixed
    r":\.3g\}": "system/text.py",  # rounded
    r"def first_line": "system/text.py",
    r"\[: ?(?:length|\d+)(?: - 1)?\](?:\.rstrip\(\))? \+ \"(?:…|\.\.\.)\"": "system/text.py",  # shortened
    r"\[a-z\]\[a-z-\]\*": "config/section.py",  # is_sbatch_option
    r"\[\^A-Za-z0-9\._-\]": "config/schema.py",  # run_name
    r"\"\.jsonl\"|\"\.parquet\"": "data/files/formats.py",
    r"\"prompt\", \"question\"": "data/counting.py",  # PROMPT_FIELDS
    r"\"object\", \"ABC\"": "importers/texts/syntax.py",  # PLAIN_BASES
    r"AsyncFunctionDef, ast\.Lambda\)\n": "importers/texts/scopes.py",  # FUNCTIONS
    r"Traceback \\\(most recent call last": "system/text.py",
    r"\.seek\(max\(": "system/text.py",
    r"/ GIB:|2 ?\*\* ?30\b|1024 ?\*\* ?3\b": "system/text.py",  # GIB, gib and in_gib
    r"\b32 (?:<<|\* 2 ?\*\*) ?20\b": "config/constants.py",  # NCCL_BYTES
    r"\ble=256\b|GPUS\w* = 256\b": "config/constants.py",  # MOST_GPUS_PER_NODE
    r"OMP_WAIT_POLICY|TOKENIZERS_PARALLELISM": "system/environment.py",  # offline and brief_spinning
    r"SLURMD_NODENAME\"\) or": "system/environment.py",  # node_name
    r"model\.safetensors\.index|\b100 ?(?:<<|\* ?2 ?\*\*) ?20\b": "models/weight_files.py",
    r"\"attempt\.json\"": "runs/directory.py",
    r"dtype or \S*config\.model\.dtype": "config/derived.py",  # engine_dtype
    r"\b64 (?:<<|\* 2 ?\*\*) ?20\b": "config/constants.py",  # WHOLE_FILE_BYTES
    r"__file__\)\.resolve\(\)\.parent": "system/environment.py",  # import_root
    r"memory\.max|limit_in_bytes|/proc/meminfo|\"meminfo\"": "system/host_memory.py",
    r"import netrc|api\.wandb\.ai|WANDB_BASE_URL": "config/reading/wandb_account.py",
    r"engines_per_node or (?!\d)|max\(1, gpus // (?:tp|size)\)": "config/derived.py",
    r"=\(\\S\*\)\"\)": "launch/slurm/commands.py",  # parse_pairs
    r"(?<!_DEEPEP)_NODE = 8\b": "config/constants.py",  # USUAL_GPUS_PER_NODE
    r"\"generate\", \"": "config/constants.py",  # PHASES
    r"\bMOST = 0\.95\b": "planning/estimates/advice.py",  # of a card, for an engine
    r"average length of a response": "cli/parser.py",
    r"(?:EXIT_|\b)(?:DONE|FAILED|REFUSED|REQUEUE)(?:, \w+)* = \d": "system/exit_codes.py",
}


def sources(project: Path) -> Iterator[tuple[str, str]]:
    for path in sorted((project / "gspo_hpc").rglob("*.py")):
        yield path.relative_to(project / "gspo_hpc").as_posix(), path.read_text(encoding="utf-8")


@pytest.mark.parametrize("pattern", HOMES)
def test_one_file_says_it(project: Path, pattern: str) -> None:
    found = [name for name, text in sources(project) if re.search(pattern, text)]
    assert found == [HOMES[pattern]]


def test_environment_variables_are_named_once(project: Path) -> None:
    names = [value for name, value in vars(environment).items() if name.isupper()]
    assert len(names) == len(set(names)) and all(name.startswith("GSPO_HPC_") for name in names)
    for name, text in sources(project):
        if name == "system/environment.py":
            continue
        constants = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
        assert [one for one in constants if isinstance(one, str) and re.fullmatch(r"GSPO_HPC_\w+", one)] == [], name


def test_every_variable_is_used(project: Path) -> None:
    everything = "".join(text for name, text in sources(project) if name != "system/environment.py")
    for name in vars(environment):
        assert not name.isupper() or re.search(rf"\b{name}\b", everything), name


def test_exit_codes_differ() -> None:
    codes = [value for name, value in vars(exit_codes).items() if name.isupper()]
    assert len(codes) == len(set(codes)) == 9


@pytest.mark.parametrize(("lane", "oldest"), [("VLLM", "0.22"), ("TORCH", "2.11")])
def test_what_is_said_of_versions_is_what_the_lanes_run(project: Path, lane: str, oldest: str) -> None:
    """A range in a docstring ends with the newest version that a lane of tools/lanes.sh runs."""
    (listed,) = re.findall(rf"^{lane}=\((.*?)\)", (project / "tools/lanes.sh").read_text("utf-8"), re.MULTILINE)
    newest = listed.split()[-1].rpartition(".")[0]
    said = {end for _, text in sources(project) for end in re.findall(rf"{re.escape(oldest)} to (\d+\.\d+)", text)}
    assert said == {newest}
