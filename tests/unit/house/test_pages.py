"""All that pages name is there: commands with their options, settings, files and links. No table is too wide.

It takes a second, and catches an option, a key or a file that was renamed without its page.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gspo_hpc.cli import parser as command_line
from gspo_hpc.config import loader, plugins, schema
from gspo_hpc.planning.plan import make_plan
from tests import pages

WIDEST = 200  # characters of a cell
OURS = ("tests/", "tools/", "gspo_hpc/", "configs/", "docs/", "slurm/", ".ci/")  # folders whose files are named by path
FILES = (".yaml", ".json", ".conf", ".log", ".py", ".sh")
OTHERS = {
    "rollout.n",
    "batch.part",
    "batch.PackedBatch",
}  # look like settings: one of verl's, and names of ops/batch.py
by_page = pytest.mark.parametrize("page", pages.PAGES, ids=pages.name_of)


def options(words: str) -> list[str]:
    """Options among the arguments of a command; those in brackets too, but not those in the value of an option."""
    words = re.sub(r"(--[\w-]+)=('[^']*'|\"[^\"]*\")", r"\1", words)
    return re.findall(r"(?<![\w./=-])(--?[a-zA-Z][\w-]*)", words)


def mistakes_of_ours(words: str) -> list[str]:
    """Return the mistakes in a command line of gspo-hpc."""
    name = words.split()[0]
    if name.startswith("-"):
        return [one for one in options(words) if one not in ("--help", "--version")]
    if name not in command_line.COMMANDS:
        return [] if name == "COMMAND" else [f"no command {name}"]
    known = {text for action in command_line.parser_of(name)._actions for text in action.option_strings}
    return [f"{name}: no option {one}" for one in options(words) if one not in known]


def mistakes_of_script(program: str, words: str) -> list[str]:
    """Return the mistakes in the start of a script or module of this project; other programs are not looked at."""
    first, *rest = words.split()
    if first == "-m" and rest[0].partition(".")[0] in ("gspo_hpc", "tests"):
        first, *rest = rest
        path = pages.PROJECT / f"{first.replace('.', '/')}.py"
        path = path if path.exists() else path.with_suffix("") / "__main__.py"
    elif first.startswith(OURS):
        path = pages.PROJECT / first
    else:
        return []
    if not path.is_file():
        return [f"{program} {first}: no such file"]
    text = path.read_text("utf-8")
    return [f"{first}: no option {one}" for one in options(" ".join(rest)) if not takes(text, one)]


def takes(source: str, option: str) -> bool:
    """Tell if the source of a script has an option, or a name in quotes of which it makes one."""
    name = option[2:].replace("-", "_")
    return option in ("--help", "-h") or bool(re.search(rf'(?<![\w-]){option}(?![\w-])|"{name}"', source))


def mistakes(text: str) -> list[str]:
    """Return the mistakes in the commands of a page."""
    found = []
    for program, words in pages.commands(text):
        found += mistakes_of_ours(words) if program == "gspo-hpc" else mistakes_of_script(program, words)
    return found


def is_setting(key: str) -> bool:
    """Tell if a dotted key is one of the config, or a pattern that fits some."""
    steps = key.split(".")
    if "*" in key:
        return any(re.fullmatch(key.replace(".", r"\.").replace("*", r"\w*"), known) for known in schema.keys())
    if steps[0] == "algorithm" and len(steps) == 2:
        return any(steps[1] in kind.model_fields for kind in plugins.algorithms().values())
    return schema.kind_at(steps) is not None


def is_module(name: str) -> bool:
    """Tell if a dotted name is a module or folder of the package."""
    path = pages.PROJECT / "gspo_hpc" / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def unknown_settings(text: str) -> list[str]:
    """The settings that a page names and the config lacks."""
    sections = "|".join(schema.Config.model_fields)
    named = set()
    for span in pages.spans(text):
        if found := re.match(rf"((?:{sections})(?:\.[\w*]+)+)(?=$|[=: ])", span):
            named.add(found[1])
    for _, words in pages.commands(text):
        named |= set(re.findall(rf"(?<!\S)((?:{sections})(?:\.\w+)+)=", words))
    keys = (key for key in named - OTHERS if not key.endswith(FILES))
    return sorted(key for key in keys if not is_setting(key) and not is_module(key))


@by_page
def test_commands_have_the_options_that_pages_give_them(page: Path) -> None:
    assert mistakes(page.read_text("utf-8")) == []


@pytest.mark.parametrize("path", sorted((pages.PROJECT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_commands_in_comments_of_configs(path: Path) -> None:
    comments = [line.lstrip("# ") for line in path.read_text("utf-8").splitlines() if line.startswith("#")]
    lines = [line.split(":", 1)[-1].split("   ")[0].split("(")[0].strip() for line in comments]
    found = list(pages.commands("```\n" + "\n".join(lines) + "\n```"))
    assert found and mistakes("```\n" + "\n".join(lines) + "\n```") == []
    named = [word for _, words in found for word in words.split() if word.startswith("configs/")]
    assert set(named) <= {f"configs/{path.name}"}


# convert.md names settings of other projects.
@pytest.mark.parametrize("page", [page for page in pages.PAGES if page.name != "convert.md"], ids=pages.name_of)
def test_settings_are_keys_of_the_config(page: Path) -> None:
    assert unknown_settings(page.read_text("utf-8")) == []


@by_page
def test_files_are_there(page: Path) -> None:
    text = page.read_text("utf-8")
    if page.name == "CONTRIBUTING.md":  # its examples are files that are yet to be written
        text = text.split("\n## One way to add a thing\n")[0] + text.split("\n## Style\n")[1]
    named = [span for span in pages.spans(text) if span.startswith(OURS) and re.fullmatch(r"[\w./-]+", span)]
    assert [name for name in named if not (pages.PROJECT / name).exists()] == []


@by_page
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text("utf-8")
    for target in pages.links(text):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        goal = (page.parent / file).resolve() if file else page
        assert goal.exists(), target
        assert not anchor or anchor in pages.anchors(goal.read_text("utf-8")), target


@by_page
def test_tables_can_be_read(page: Path) -> None:
    assert [cell for cell in pages.cells(page.read_text("utf-8")) if len(cell) > WIDEST] == []


def other_names(text: str) -> list[str]:
    """Words for a thing that has another name: a reward function, and a fix of a plan."""
    words = re.sub(r"`[^`]+`", "", pages.prose(text))
    return re.findall(r"(?i)\b(?:graders?|mends?|mended)\b", words)


@by_page
def test_a_thing_has_one_name(page: Path) -> None:
    assert other_names(page.read_text("utf-8")) == []


def run_on(text: str) -> list[str]:
    """Items of lists that went on the line of the item before, as when a paragraph is filled."""
    return re.findall(r"\S - \*\*.*", pages.prose(text))


@by_page
def test_every_item_of_a_list_has_its_line(page: Path) -> None:
    assert run_on(page.read_text("utf-8")) == []


def scripts_without_a_row(folder: Path) -> list[str]:
    """Files of a folder that its README does not name."""
    text = (folder / "README.md").read_text("utf-8")
    return sorted(path.name for path in folder.iterdir() if path.is_file() and f"`{path.name}`" not in text)


def test_the_page_of_the_benchmarks_names_every_file() -> None:
    assert scripts_without_a_row(pages.PROJECT / "tools" / "bench") == ["README.md"]


@by_page
def test_configs_that_pages_show_are_valid(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as one can tell without the model and the data that they name; a part of a config is a config, too."""
    monkeypatch.chdir(tmp_path)
    for number, block in enumerate(pages.blocks(page.read_text("utf-8"), "yaml")):
        if re.match(rf"(# .*\n)*({'|'.join(schema.Config.model_fields)}):", block):
            path = tmp_path / f"{number}.yaml"
            path.write_text(block)
            plan = make_plan(loader.load(path))
            assert [one.message for one in plan.broken] == [], block


def described(text: str) -> list[str]:
    """Return the rooms that ARCHITECTURE.md has a paragraph about, in its order."""
    (section,) = re.findall(r"(?ms)^## Rooms\n(.*?)^## ", text)
    return re.findall(r"(?m)^- `(\w+)` ", section.split("\n### ")[0])


def test_every_room_has_one_paragraph() -> None:
    rooms = sorted(path.parent.name for path in (pages.PROJECT / "gspo_hpc").glob("*/__init__.py"))
    assert 10 < len(rooms) <= 26
    assert sorted(described((pages.PROJECT / "ARCHITECTURE.md").read_text("utf-8"))) == rooms


def test_the_map_of_the_readme_is_short_and_names_all_folders() -> None:
    (section,) = re.findall(r"(?ms)^## Map\n\n(.*?)\n\n", (pages.PROJECT / "README.md").read_text("utf-8"))
    assert len(section.splitlines()) <= 12
    folders = {path.name for path in pages.PROJECT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    tracked = folders & {"gspo_hpc", "configs", "slurm", "tools", "tests", "docs"}
    assert len(tracked) == 6
    assert [name for name in sorted(tracked) if f"`{name}/`" not in section and f"({name}/" not in section] == []


def test_every_command_is_in_the_readme() -> None:
    text = (pages.PROJECT / "README.md").read_text("utf-8")
    named = {words.split()[0] for program, words in pages.commands(text) if program == "gspo-hpc"}
    assert named - {"COMMAND"} == set(command_line.COMMANDS)


def test_the_page_on_security_names_every_setting_that_names_code() -> None:
    """Settings say path/to/file.py in the reference; those of lists and mappings, and of Slurm and vLLM, stand here."""
    reference = (pages.PROJECT / "docs" / "reference.md").read_text()
    keys = set(re.findall(r"(?m)^- \*\*`([\w.]+)`\*\*.*path/to/file\.py", reference))
    assert {"algorithm.name", "environment.name", "tracking.observers"} <= keys
    keys |= {"reward.functions", "data.sources", "environment.tools", "rollout.engine", "slurm.environment"}
    text = (pages.PROJECT / "SECURITY.md").read_text()
    table = text[text.index("### Settings that name code") :].split("\n\n")[1]
    assert {key for key in keys if f"`{key}`" not in table} == set()


def test_planted_items_and_files_are_found(tmp_path: Path) -> None:
    assert other_names("Graders and `grader`, and the mend.") == ["Graders", "mend"]
    assert run_on("- **A.** b\n- **C.** d\nand e. - **F.** g\n") == [". - **F.** g"]
    for name, text in {"README.md": "`a.py`", "a.py": "", "b.py": ""}.items():
        (tmp_path / name).write_text(text)
    assert scripts_without_a_row(tmp_path) == ["README.md", "b.py"]
    assert described("## Rooms\n- `a` is\n- `b` has\n\n### By hand\n- `c` is\n## D\n- `d` is\n") == ["a", "b"]


def test_planted_mistakes_are_found() -> None:
    text = """
`gspo-hpc plam x` and `gspo-hpc plan x --jsn`; see `gspo-hpc plan x --json key=--no`.

```bash
python tools/rules.py --chek     # a comment with --wrong
.venv/bin/gspo-hpc status runs/a --wach && bash tools/gone.sh
python -m tests.slurm.chaos --fautls 3
```

    gspo-hpc suggest CONFIG [--limt N]

`batch.micro_batch_sise` and `slurm.environment.ANY='1'`; `faults.*_timeout`, `data.packing`, `run.seeds=3`
"""
    assert mistakes(text) == [
        "tools/rules.py: no option --chek",
        "status: no option --wach",
        "bash tools/gone.sh: no such file",
        "tests.slurm.chaos: no option --fautls",
        "suggest: no option --limt",
        "no command plam",
        "plan: no option --jsn",
    ]
    assert unknown_settings(text) == ["batch.micro_batch_sise", "run.seeds"]
    assert len(list(pages.cells("| [a](b) | " + "x" * 201 + " |\n"))) == 2
    assert pages.anchors("# A b: `c`, d\n```\n# no\n```\n") == {"a-b-c-d"}
