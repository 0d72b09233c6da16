"""The runner of the acceptance on a GPU, and its page: parts that hang, die, miss a bound or lack a package (3 s)."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools.acceptance import __main__ as command
from tools.acceptance import page, plugin, registry, rows, runner
from tools.acceptance.environment import Environment
from tools.acceptance.hardware import Gpus
from tools.acceptance.registry import PARTS, Part
from tools.acceptance.rows import FAIL, FIGURE, NOT_APPLICABLE, PASS, SKIPPED, Recorder, Row
from tools.acceptance.runner import RUNNING, WAITING, Result, Runner

MODULES = {
    "good": "record.figure('speed', '3 tokens/s')\n    record.at_most('error', 0.5, 1.0, ' nats')",
    "on_a_gpu": "record.check('memory', '5 GiB', 'at most 1 GiB', False, gpu_only=True)",
    "misses": "record.at_most('error', 2.0, 1.0)\n    record.at_most('other', 0.0, 1.0)",
    "raises": "record.figure('before', '1')\n    raise ValueError('the reason')",
    "dies": "import os, signal\n    os.kill(os.getpid(), signal.SIGSEGV)",
    "leaves": "import subprocess\n    made = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    "    record.figure('process', str(made.pid))",
    "hangs": "record.figure('before', '1')\n    import time\n    time.sleep(600)",
}
LACKS = "no_such_package"


def part(name: str, seconds: int = 60, packages: tuple[str, ...] = (), gpus: int = 1) -> Part:
    return Part(name, f"The part {name}", seconds, packages, gpus, module=f"planted_{name}")


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the modules of the parts."""
    folder = tmp_path_factory.mktemp("parts")
    for name, body in MODULES.items():
        (folder / f"planted_{name}.py").write_text(f"def run(env, record):\n    {body}\n")
    return folder


@pytest.fixture(scope="module")
def reports() -> list[list[Result]]:
    return []


@pytest.fixture(scope="module")
def results(planted: Path, reports: list[list[Result]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Every kind of part, in one go."""
    env = Environment("cpu", tmp_path_factory.mktemp("work"))
    parts = [part(name) for name in MODULES if name != "hangs"]
    parts += [part("hangs", seconds=1), part("lacks", packages=("os", LACKS)), part("good")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(planted), *filter(None, [os.environ.get("PYTHONPATH")])]))
        patch.setattr(runner, "_POLL_SECONDS", 0.02)
        found = Runner(env, 0, lambda now: reports.append(list(now))).run(parts)
    assert found[-1].verdict == PASS, "parts after a hang are run"
    return {one.part.name: one for one in found}


@pytest.mark.parametrize(
    ("name", "verdict", "reason", "count"),
    [
        ("good", PASS, "", 2),
        ("on_a_gpu", NOT_APPLICABLE, "", 1),
        ("misses", FAIL, "", 2),
        ("raises", FAIL, "it ended with code 1: ValueError: the reason", 1),
        ("dies", FAIL, "it ended with signal SIGSEGV: ", 0),
        ("leaves", PASS, "", 1),
        ("hangs", FAIL, "it ran past its limit of 1 s", 1),
        ("lacks", SKIPPED, f"not installed: {LACKS}", 0),
    ],
)
def test_each_part_has_its_verdict(
    results: dict[str, Result], name: str, verdict: str, reason: str, count: int
) -> None:
    found = results[name]
    assert found.verdict == verdict and found.reason.startswith(reason) and bool(found.reason) == bool(reason)
    assert len(found.rows) == count, "what was measured before the end is kept"


def test_rows_are_reported_while_a_part_runs(results: dict[str, Result], reports: list[list[Result]]) -> None:
    hanging = [one for now in reports for one in now if one.part.name == "hangs" and one.verdict == RUNNING]
    assert any(one.rows == (Row("before", "1"),) for one in hanging)
    assert page.render({}, reports[0]).count(WAITING) == len(MODULES) + 1, "the page has parts that come later"


def test_nothing_that_a_part_started_is_left(results: dict[str, Result]) -> None:
    _wait_until_gone(int(results["leaves"].rows[0].figure))


def _wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and _state(pid) != "Z":
        assert time.monotonic() < deadline, "still there"
        time.sleep(0.02)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_nothing_is_left_of_a_killed_runner(planted: Path, tmp_path: Path) -> None:
    """A process of the part in a session of its own: what dies with its parent is not enough."""
    code = (
        "import sys; from pathlib import Path; from tools.acceptance.registry import Part\n"
        "from tools.acceptance.runner import Runner; from tools.acceptance.environment import Environment\n"
        "runner = Runner(Environment('cpu', Path(sys.argv[1])), 0, lambda results: None)\n"
        "runner.run([Part('both', '', 60, (), module='planted_both')])"
    )
    body = MODULES["leaves"] + "\n    import time\n    time.sleep(600)"
    (planted / "planted_both.py").write_text(f"def run(env, record):\n    {body}\n")
    variables = os.environ | {"PYTHONPATH": f"{planted}{os.pathsep}{registry_root()}"}
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=variables)
    deadline = time.monotonic() + 60
    while not (found := rows.read(tmp_path / "logs" / "both.jsonl")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    _wait_until_gone(int(found[0].figure))


def test_a_failed_part_fails_the_whole(results: dict[str, Result]) -> None:
    assert runner.failed(list(results.values())) and not runner.failed([results["good"], results["lacks"]])


def test_gpus_and_time_that_are_not_there(tmp_path: Path) -> None:
    """Nothing is started: the modules of these parts do not exist."""
    reported: list[Sequence[Result]] = []
    env = Environment("cuda", tmp_path)
    (pair,) = Runner(env, 1, reported.append).run([part("pair", gpus=2)])
    assert (pair.verdict, pair.reason) == (SKIPPED, "it needs 2 GPUs, and there is 1")
    (late,) = Runner(env, 1, reported.append, seconds=5.0).run([part("late")])
    assert late.verdict == WAITING and late.reason.startswith("only ")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([FIGURE], PASS),
        ([], PASS),
        ([PASS, FAIL, NOT_APPLICABLE], FAIL),
        ([PASS, NOT_APPLICABLE, SKIPPED], PASS),
        ([NOT_APPLICABLE, FIGURE], NOT_APPLICABLE),
    ],
)
def test_verdict_of_rows(found: list[str], expected: str) -> None:
    assert rows.verdict([Row("what", "1", "", one) for one in found]) == expected


def test_no_number_keeps_no_bound(tmp_path: Path) -> None:
    record = Recorder(tmp_path / "rows", "cuda")
    for value in (1.0, 1.01, math.nan, math.inf):
        record.at_most("error", value, 1.0, gpu_only=True)
    with (tmp_path / "rows").open("a") as stream:
        stream.write('{"what": "torn')  # by a machine that is taken away
    assert [row.verdict for row in rows.read(tmp_path / "rows")] == [PASS, FAIL, FAIL, FAIL]


def test_page(tmp_path: Path) -> None:
    measured = (Row("a | b", "1\n2", "at most 1", FAIL), Row("c", "3", "", NOT_APPLICABLE), Row("d", "4"))
    found = [
        Result(part("good"), FAIL, "", 12.3, measured),
        Result(part("dies"), FAIL, "it ended with code 1"),
        Result(part("lacks"), SKIPPED, "not installed: x"),
        Result(part("on_a_gpu"), NOT_APPLICABLE, "", 1.0, measured[1:]),
    ]
    text = page.render({"device": "one"}, found)
    assert "| good | The part good | 12 | **fail**, 1 of 3 rows |" in text
    assert "| a \\| b | 1 2 | at most 1 | **fail** |" in text and "| d | 4 |  |  |" in text
    assert "| the part as a whole | it ended with code 1 | | **fail** |" in text
    assert "| lacks | The part lacks |  | skipped: not installed: x |" in text and "## lacks" not in text
    assert "| 1 | not applicable on a CPU; 1 of 2 rows: not applicable on a CPU |" in text
    file = tmp_path / "new" / "page.md"
    page.write(file, text)
    page.write(file, text)
    assert file.read_text() == text and [one.name for one in file.parent.iterdir()] == ["page.md"]


@pytest.mark.parametrize(("names", "code"), [(("good",), 0), (("misses", "good"), 1)])
def test_exit_code_and_page_of_the_command(
    planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], code: int
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(planted), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setattr(command, "PARTS", tuple(part(name) for name in names))
    monkeypatch.setattr(command, "find_gpus", lambda: Gpus(0))
    monkeypatch.setattr(runner, "_POLL_SECONDS", 0.02)
    out = tmp_path / "page.md"
    assert command.main(["--out", str(out), "--work", str(tmp_path / "work")]) == code
    text = out.read_text()
    assert all(f"| {name} |" in text for name in names) and "a CPU: figures of speed" in text
    assert RUNNING not in text


def test_a_gpu_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_gpus", lambda: Gpus(0))
    assert command.main(["--platform", "cuda", "--work", str(tmp_path)]) == 2
    assert "finds no GPU; --platform cpu" in capsys.readouterr().err


def test_every_part_is_a_module_with_a_way_to_run(project: Path) -> None:
    for one in PARTS:
        text = (project / (one.import_path.replace(".", "/") + ".py")).read_text()
        assert "\ndef run(env: Environment, record: Recorder) -> None:\n" in text, one.name
    files = {file.stem for file in (project / "tools" / "acceptance" / "parts").glob("*.py")} - {"__init__"}
    assert files == {one.name for one in PARTS}


def test_packages_are_found_without_importing_them() -> None:
    code = (
        "import sys; from tools.acceptance.registry import missing; "
        "print(missing(['torch', 'megatron.core', 'nowhere.core']), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=registry_root(), check=True)
    assert done.stdout.split("]")[0].endswith("'nowhere.core'") and done.stdout.strip().endswith("False")


def registry_root() -> Path:
    return Path(registry.__file__).parents[2]


def test_vllm_finds_the_plugin_of_a_checkout_that_is_not_installed(tmp_path: Path) -> None:
    plugin._write_metadata(tmp_path / "gspo_hpc-0.dist-info")
    code = (
        "import importlib.metadata as m; "
        "print([e.value for e in m.entry_points(group='vllm.general_plugins') if e.name == 'gspo_hpc'])"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(tmp_path)},
        check=True,
    )
    assert done.stdout.strip() == "['gspo_hpc.engine.plugin:register']"


def test_the_script_says_what_is_wrong(project: Path, tmp_path: Path) -> None:
    def script(*words: str, python: str) -> subprocess.CompletedProcess[str]:
        line = ["bash", str(project / "tools" / "gpu_acceptance.sh"), *words]
        return subprocess.run(line, capture_output=True, text=True, env=os.environ | {"PYTHON": python}, cwd=tmp_path)

    assert "--parts PART" in script("--help", python="").stdout
    bare = script("--parts", "kernels", python="/bin/false")
    assert bare.returncode == 1 and "/bin/false has no torch" in bare.stderr and "PYTHON=..." in bare.stderr
    assert "no-such-python, which is no program" in script(python="no-such-python").stderr
