"""docs/install.md names the versions of CONTRIBUTING.md, setup.cfg and the set-up script; its commands can be parsed.

It takes a second. It catches a range, a resolved set or a Python that moved without the page, and mistakes in the
syntax of commands. Those that install are not run: they need a package index, and those for GPUs a GPU.
"""

from __future__ import annotations

import re
import subprocess

import pytest

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


def test_the_packages_for_gpus_are_those_that_were_resolved() -> None:
    told = [{name: cell.split(";")[0] for name, cell in row.items()} for row in rows()]
    assert len(told) == 4 and told == resolved()


def test_the_commands_install_one_of_the_rows() -> None:
    commands = "\n".join(pages.blocks(PAGE, "bash"))
    for name, title in NAMES.items():
        given = set(re.findall(rf"(?<![\w-]){name}(?:\[pytorch\])?==([\d.]+)", commands))
        assert len(given) == 1, name
        (version,) = given
        assert version in rows()[1][title].split(" or "), name


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
