"""docs/install.md names the versions of CONTRIBUTING.md, setup.cfg and the set-up script; its commands can be parsed.

It takes a second. It catches a range, a resolved set or a Python that moved without the page, and mistakes in the
syntax of commands. Those that install are not run: they need a package index, and those for GPUs a GPU;
`bash tools/lanes.sh resolve` asks the index whether the files of pins are consistent.
"""

from __future__ import annotations

import configparser
import importlib.metadata
import re
import subprocess

import pytest
from packaging.specifiers import SpecifierSet

from gspo_hpc.doctor.packages import requirement, satisfies
from tests import pages

PAGE = (pages.PROJECT / "docs" / "install.md").read_text("utf-8")
NAMES = {"vllm": "vLLM", "torch": "torch", "megatron-core": "megatron-core", "transformer-engine": "Transformer Engine"}


def read(path: str) -> str:
    return (pages.PROJECT / path).read_text("utf-8")


def rows() -> list[dict[str, str]]:
    """The rows of the table of packages for GPUs."""
    table = PAGE.split("| vLLM | torch |")[1].split("\n\n")[0].splitlines()[2:]
    return [
        dict(zip(NAMES.values(), (cell.strip() for cell in row.strip("|").split("|")), strict=True)) for row in table
    ]


def resolved() -> list[dict[str, str]]:
    """What CONTRIBUTING.md lists as resolved and consistent, in its order."""
    found = []
    for text in re.findall(r"(?m)^\| (.*vLLM .*) \| resolve \| consistent", read("CONTRIBUTING.md")):
        versions = {name: re.findall(rf"{name} ([\d.]+(?: and [\d.]+)*)", text)[0] for name in NAMES.values()}
        found.append({name: version.replace(" and ", " or ") for name, version in versions.items()})
    return found


@pytest.mark.parametrize("name", ["cpu", "dev", "trackers"])
def test_every_pin_of_this_machine_takes_the_first_release_of_the_oldest_python(name: str) -> None:
    """Debian 12 has Python 3.11.2, and a package that asks for 3.11.5 ended the set-up there."""
    path = pages.PROJECT / "tools" / "requirements" / f"{name}.txt"
    pins = [line.split("==")[0] for line in path.read_text("utf-8").splitlines() if "==" in line and line[0] != "#"]
    asked = {pin: importlib.metadata.metadata(pin).get("Requires-Python", "") for pin in pins}
    assert pins and [pin for pin, asks in asked.items() if "3.11.0" not in SpecifierSet(asks)] == []


def test_the_packages_for_gpus_are_those_that_were_resolved() -> None:
    told = [{name: cell.split(";")[0] for name, cell in row.items()} for row in rows()]
    assert len(told) == 4 and told == resolved()


def sets() -> dict[str, dict[str, str]]:
    """The pins of each file of tools/requirements/gpu, by the version of vLLM that its name has."""
    found = {}
    for path in sorted((pages.PROJECT / "tools" / "requirements" / "gpu").iterdir()):
        lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
        assert path.suffix == ".txt" and all(re.fullmatch(r"[a-z0-9.-]+==[\w.+!]+", line) for line in lines), path
        found[path.stem.removeprefix("vllm-")] = dict(line.split("==") for line in lines)
    return found


def test_each_row_has_a_file_with_its_versions() -> None:
    assert set(sets()) == {row["vLLM"] for row in rows()}
    for row in rows():
        pins = sets()[row["vLLM"]]
        for name, title in NAMES.items():
            assert pins[name] in row[title].split(";")[0].split(" or "), (row, name)


def test_the_files_pin_what_the_package_requires() -> None:
    config = configparser.ConfigParser(interpolation=None)
    config.read(pages.PROJECT / "setup.cfg")
    lines = config["options"]["install_requires"] + config["options.extras_require"]["gpu"]
    wanted = [requirement(line) for line in lines.splitlines() if line.strip() and not line.startswith("#")]
    assert len(wanted) > 15
    for version, pins in sets().items():
        for one in wanted:
            assert one.name in pins and satisfies(pins[one.name], one.spec), (version, one)
        assert not [name for name, pin in pins.items() if "+" in pin], "a build that no index has"


def test_the_commands_name_files_and_targets_that_are_there() -> None:
    commands = "\n".join(pages.blocks(PAGE, "bash"))
    recipe = read("slurm/container/Containerfile")
    named = re.findall(r"requirements/gpu/vllm-([\d.]+)\.txt", commands) + re.findall(
        r"SET=vllm-([\d.]+)", commands + recipe
    )
    assert len(named) == 5 and set(named) <= set(sets())
    assert set(re.findall(r"--target (\w+)", commands)) <= set(re.findall(r"(?m)^FROM .* AS (\w+)$", recipe))
    assert "-f slurm/container/Containerfile" in commands


def test_ranges_are_those_of_the_package() -> None:
    (low, high), (told_low, told_high) = (
        re.findall(r"vllm>=([\d.]+),<([\d.]+)", read("setup.cfg"))[0],
        re.findall(r"allows vLLM from ([\d.]+) to ([\d.]+)\.", PAGE)[0],
    )
    assert told_low == low and int(told_high.split(".")[1]) + 1 == int(high.split(".")[1])
    (first, last) = re.findall(r"\(3, (\d+)\) <= sys\.version_info\[:2\] <= \(3, (\d+)\)", read("tools/setup_env.sh"))[
        0
    ]
    assert f"Python 3.{first} to 3.{last}" in PAGE


@pytest.mark.parametrize("page", ["install", "your-task"])
def test_blocks_of_commands_can_be_pasted(page: str) -> None:
    for block in pages.blocks(read(f"docs/{page}.md"), "bash"):
        done = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True, check=False)
        assert done.returncode == 0 and "…" not in block and not re.search(r"(?m)^\$ ", block), block


def test_install_lines_and_the_recipe_name_what_is_there() -> None:
    """Extras of setup.cfg, options of pip, and files of this checkout: a misspelt one ends an installation."""
    setup = configparser.ConfigParser()
    setup.read_string(read("setup.cfg"))
    extras = set(setup["options.extras_require"])
    recipe = read("slurm/container/Containerfile")
    for text in (PAGE, recipe):
        lines = text.replace("\\\n", " ").splitlines()
        installed = [line for line in lines if re.search(r"pip install .*\.\[", line)]
        assert installed, "no line installs the package with an extra"
        for line in installed:
            asked = {extra for group in re.findall(r"\.\[([\w,]+)\]", line) for extra in group.split(",")}
            assert asked and asked <= extras, line
            assert ("--no-build-isolation" in line) == ("gpu" in asked), line
    options = set(re.findall(r"pip install[^\n]* (--no-[\w-]+)", PAGE + recipe.replace("\\\n", " ")))
    assert options == {"--no-build-isolation", "--no-build-isolation-package", "--no-deps"}
    used = re.findall(r"/opt/gspo_hpc/source/([\w./-]+)", recipe)
    named = [path.replace("${SET}", re.findall(r"ARG SET=(\S+)", recipe)[0]) for path in used]
    files = [path for path in named if "." in path]
    assert files and [path for path in files if not (pages.PROJECT / path).exists()] == []
