"""The package as it is distributed: its sdist, and its wheel in an empty environment, used from outside a checkout.

Costs about half a minute, most of it pip. Catches a file that is read at run time and is not in the wheel, a
requirement that setup.cfg does not name, a path that only a checkout has, a description that a package index would not
render, and a version that the changelog or the citation does not have.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from gspo_hpc import __version__
from gspo_hpc.config import paths
from gspo_hpc.models import catalog
from tests.unit.importers.test_swift import SWIFT_DENSE
from tests.unit.report.test_page import FULL, make_run

PRESETS = sorted(path.stem for path in paths.PRESETS.glob("*.yaml"))


@pytest.fixture(scope="module")
def source(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git tracks and of what is new: setuptools writes beside its input."""
    copy = tmp_path_factory.mktemp("source")
    listed = ["git", "-C", str(project), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0"):
        source = project / name
        if name and (source.is_symlink() or source.exists()):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            if source.is_symlink():
                (copy / name).symlink_to(os.readlink(source))
            else:
                (copy / name).write_bytes(source.read_bytes())
    return copy


def build_wheel(source: Path, out: Path) -> Path:
    """Build the wheel of a folder or of an sdist."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(out)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, made by the hook that `python -m build` calls."""
    out = tmp_path_factory.mktemp("sdist")
    code = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    command = [sys.executable, "-c", code, str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = out.glob("*.tar.gz")
    return made


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the checkout."""
    return build_wheel(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(project: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program in an environment of its own, with what the wheel requires in the versions that are pinned."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    pins = project / "tools" / "requirements" / "cpu.txt"
    command = [
        str(folder / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "-q",
        "--no-input",
        "--disable-pip-version-check",
    ]
    done = subprocess.run(
        [*command, "-c", str(pins), str(wheel)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "bin" / "gspo-hpc"


def call(program: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the installed program in an empty folder, without anything that leads to the checkout."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "COLUMNS": "120", "LANG": "C.UTF-8"}
    return subprocess.run(
        [str(program), *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_wheel_is_the_package_and_nothing_else(source: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    information = {name for name in names if name.startswith(f"gspo_hpc-{__version__}.dist-info/")}
    files = {path.relative_to(source).as_posix() for path in (source / "gspo_hpc").rglob("*") if path.is_file()}
    links = {  # folders of a checkout that are real folders here
        f"gspo_hpc/config/{name}/{path.name}"
        for name in ("presets", "slurm_profiles")
        for path in (source / "gspo_hpc" / "config" / name).glob("*.yaml")
    }
    compiled = {name for name in files if "__pycache__" in name}
    assert names - information == (files | links) - compiled
    assert {name.partition("/")[2] for name in information} == {
        "METADATA",
        "RECORD",
        "WHEEL",
        "entry_points.txt",
        "licenses/LICENSE",
        "top_level.txt",
    }


def test_a_package_index_takes_and_renders_both(wheel: Path, sdist: Path) -> None:
    command = [sys.executable, "-m", "twine", "--no-color", "check", "--strict", str(wheel), str(sdist)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout + done.stderr
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"gspo_hpc-{__version__}.dist-info/METADATA").decode()
    for line in (
        f"Version: {__version__}",
        "License-Expression: Apache-2.0",
        "Description-Content-Type: text/markdown",
    ):
        assert line in metadata.splitlines(), line


def test_a_description_that_does_not_render_is_refused(source: Path, tmp_path: Path) -> None:
    """What the check before would catch: markup that is declared as another one, and wrong there."""
    copy = tmp_path / "source"
    shutil.copytree(source, copy, symlinks=True)
    text = (copy / "setup.cfg").read_text()
    (copy / "setup.cfg").write_text(text.replace("text/markdown", "text/x-rst"))
    wheel = build_wheel(copy, tmp_path / "out")
    command = [sys.executable, "-m", "twine", "--no-color", "check", "--strict", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and "syntax errors in markup" in done.stdout, done.stdout


def test_the_version_has_its_section_and_its_citation(project: Path) -> None:
    """The fields are those that the format 1.2.0 requires, and the date is that of the section."""
    cited = yaml.safe_load((project / "CITATION.cff").read_text("utf-8"))
    assert {"cff-version", "message", "title", "authors", "version", "date-released", "license"} <= set(cited)
    assert (cited["cff-version"], str(cited["version"]), cited["license"]) == ("1.2.0", __version__, "Apache-2.0")
    assert all(set(one) <= {"name"} or {"family-names", "given-names"} <= set(one) for one in cited["authors"])
    heads = re.findall(r"^## (.+)$", (project / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert heads[:2] == ["Unreleased", f"{__version__} - {cited['date-released']}"]


def test_the_changelog_has_the_sections_that_it_promises(project: Path) -> None:
    """Lines of a version used to be one list, in which nobody finds what was fixed or is gone."""
    sections = ["Highlights", "Added", "Changed", "Fixed", "Removed", "Security"]
    for version in re.split(r"(?m)^## ", (project / "CHANGELOG.md").read_text("utf-8"))[1:]:
        heads = re.findall(r"^### (.+)$", version, re.MULTILINE)
        assert heads == [one for one in sections if one in heads], version.splitlines()[0]
        assert not version.partition("\n")[2].partition("###")[0].strip().startswith("-"), "a line outside of them"


BEFORE = re.compile(
    r"no longer|used to|\\bformerly\\b|development version|until now|was (?:not|taken|refused|told|called)\\b"
)


def test_the_first_release_speaks_of_no_version_before_it(project: Path) -> None:
    """It had 280 lines of faults that nobody outside had seen, and of settings that were called otherwise."""
    *_, first = re.split(r"(?m)^## ", (project / "CHANGELOG.md").read_text("utf-8"))
    assert re.findall(r"^### (.+)$", first, re.MULTILINE) == ["Highlights", "Added", "Security"]
    assert BEFORE.findall(first) == []
    assert BEFORE.findall("It used to end, and is no longer refused; sums were otherwise until now") != []


TOPICS = (
    *("Training", "Data, rewards and code of your own", "Plan, suggest and doctor", "Converters"),
    *("Slurm, faults and resuming", "Seeing a run", "Distribution"),
)


def disorder(unreleased: str) -> list[str]:
    """Entries of Added, Changed or Fixed without a topic, and topics that are none or out of their order."""
    found = []
    for section in re.split(r"(?m)^### ", unreleased)[1:]:
        name, *parts = re.split(r"(?m)^#### ", section)
        topics = [part.splitlines()[0] for part in parts]
        if topics != [one for one in TOPICS if one in topics]:
            found.append(f"topics of {name.split()[0]}: {topics}")
        if name.split()[0] in ("Added", "Changed", "Fixed") and "\n- " in name:
            found.append(f"no topic: {name.split('- ', 1)[1].splitlines()[0]}")
    return found


def entries(text: str) -> list[str]:
    return [" ".join(one.split()) for one in re.findall(r"(?ms)^- .*?(?=^- |^#|\Z)", text)]


def test_what_is_unreleased_is_ordered_by_topic_and_said_once(project: Path) -> None:
    """A merge had brought back all entries of the version before, beside the section that sums them up."""
    text = (project / "CHANGELOG.md").read_text("utf-8")
    _, unreleased, released = text.split("\n## ")
    assert disorder(unreleased) == disorder(released) == []
    told = entries(text)
    assert len(told) > 60 and sorted({one for one in told if told.count(one) > 1}) == []
    planted = "Unreleased\n\n### Added\n\n- a\n\n#### Converters\n\n- b\n\n#### Training\n\n- b\n"
    assert len(disorder(planted)) == 2 and entries(planted) == ["- a", "- b", "- b"]


def test_the_wheel_holds_what_is_read_at_run_time(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {f"gspo_hpc/config/presets/{name}.yaml" for name in PRESETS} <= names
    profiles = {f"gspo_hpc/config/slurm_profiles/{path.name}" for path in paths.PROFILES.glob("*.yaml")}
    assert profiles and profiles <= names
    assert {f"gspo_hpc/models/configs/{name}.json" for name in catalog.names()} <= names
    assert not any(name.startswith("tests/") for name in names)


def test_the_sdist_holds_real_files_and_no_tests(sdist: Path) -> None:
    """The folders of presets and profiles are links in a checkout: a link would lead nowhere where it is unpacked."""
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert all(member.isfile() or member.isdir() for member in members)
    names = {member.name.partition("/")[2] for member in members}
    assert {f"gspo_hpc/config/presets/{name}.yaml" for name in PRESETS} <= names
    assert {name for name in names if "/" not in name} == {
        "",
        "CHANGELOG.md",
        "CITATION.cff",
        "LICENSE",
        "MANIFEST.in",
        "PKG-INFO",
        "README.md",
        "SECURITY.md",
        "gspo_hpc",
        "gspo_hpc.egg-info",
        "pyproject.toml",
        "setup.cfg",
    }
    assert {name.partition("/")[0] for name in names if "/" in name} == {"gspo_hpc", "gspo_hpc.egg-info"}
    assert not any("__pycache__" in name for name in names)


def test_the_wheel_of_the_sdist_is_that_of_the_checkout(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    contents = []
    for path in (wheel, build_wheel(sdist, tmp_path)):
        with zipfile.ZipFile(path) as archive:
            contents.append({name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")})
    ours, theirs = contents
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


@pytest.mark.parametrize(("name", "code"), [("qwen3_30b_a3b_ep8", 3), ("tiny_cpu", 3)])
def test_presets_are_planned_by_name(installed: Path, tmp_path: Path, name: str, code: int) -> None:
    """Their data are not there, which is told; and nothing is known of the model of tiny_cpu where it was not made."""
    assert name in PRESETS
    done = call(installed, tmp_path, "plan", name, "--json")
    assert done.returncode == code, done.stdout + done.stderr
    assert json.loads(done.stdout)["valid"] is True


def test_the_installed_program_says_its_version(installed: Path, tmp_path: Path) -> None:
    done = call(installed, tmp_path, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"gspo-hpc {__version__}\n", "")


def test_a_project_is_begun_and_planned(installed: Path, tmp_path: Path) -> None:
    begun = call(installed, tmp_path, "init", "sums")
    assert begun.returncode == 0, begun.stdout + begun.stderr
    done = call(installed, tmp_path / "sums", "plan", "config.yaml", "model.path=Qwen/Qwen3-0.6B")
    assert done.returncode == 0 and "valid as far as checked" in done.stdout, done.stdout + done.stderr


def test_the_python_interface_is_installed(installed: Path, tmp_path: Path) -> None:
    code = "import gspo_hpc; print(gspo_hpc.plan(gspo_hpc.load_config('qwen3_30b_a3b_ep8')).valid)"
    done = call(installed.with_name("python"), tmp_path, "-c", code)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_a_profile_is_found_by_name_and_the_batch_script_is_shown(installed: Path, tmp_path: Path) -> None:
    words = ("qwen3_30b_a3b_ep8", "slurm.profile=gpu_cluster")
    plan = call(installed, tmp_path, "plan", *words, "--sbatch")
    assert plan.returncode == 3, plan.stderr  # the data of a preset are not there
    done = call(installed, tmp_path, "submit", *words, "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("#SBATCH --partition=gpu", "#SBATCH --time=240", "#SBATCH --exclusive"):
        assert line in done.stdout, done.stdout
        assert line in plan.stdout
    assert list(tmp_path.iterdir()) == []  # a dry run writes nothing


def test_a_missing_profile_is_named(installed: Path, tmp_path: Path) -> None:
    done = call(installed, tmp_path, "plan", "tiny_cpu", "slurm.profile=no_such_cluster")
    assert done.returncode == 2
    assert "no_such_cluster" in done.stderr and "Traceback" not in done.stderr


def test_a_script_is_converted(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(SWIFT_DENSE)
    done = call(installed, tmp_path, "convert", "train.sh", "--out", "mine.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "global_batch_size: 128" in (tmp_path / "mine.yaml").read_text()


def test_a_report_is_written(installed: Path, tmp_path: Path) -> None:
    run, out = make_run(tmp_path / "run", FULL), tmp_path / "page.html"
    done = call(installed, tmp_path, "report", str(run.path), "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    page = out.read_text()
    assert "<svg" in page and "<style" in page and "</html>" in page


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("schema",), 0),
        (("completion", "bash"), 0),
        (("suggest", "qwen2.5_7b_tp2", "--limit", "1"), 0),
        (("status", "RUN"), 0),
        (("diagnose", "RUN", "--json"), 0),
        (("doctor", "--json"), 1),  # what trains is not installed
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_command_has_the_libraries_that_it_needs(
    installed: Path, tmp_path: Path, words: tuple[str, ...], code: int
) -> None:
    run = make_run(tmp_path / "run", FULL)
    done = call(installed, tmp_path, *(str(run.path) if word == "RUN" else word for word in words))
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout
