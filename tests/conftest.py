"""Few threads, no network and no account for all tests; and the lanes that they run in.

tools/test.sh starts four pytest-xdist workers. Tests of one file stay together, and so do all tests of a tier that
shares something expensive: the ranks of gloo, the engines, the undisturbed runs, the Slurm cluster. The Slurm tier
comes first and takes one worker. It mostly waits for Slurm's clocks, so the others compute beside it, at a lower
priority: what is timed on the cluster must not wait for a test that computes.
"""

from __future__ import annotations

import gc
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

SHARED = ("gloo", "engine", "run", "slurm")  # tiers whose tests stay on one worker
# But for files that share little or nothing with others: the worker that is free takes them beside the rest.
ALONE = (
    *(f"tests/gloo/test_{name}.py" for name in ("dry_run", "smollm2", "stage_shapes")),
    *(f"tests/run/test_{name}.py" for name in ("begun_anew", "failed_starts", "failing_rank", "listeners", "mixture")),
    *(f"tests/run/test_{name}.py" for name in ("judge", "notebook", "quickstart_page", "random_judge", "server")),
    *(f"tests/run/test_{name}.py" for name in ("dynamic_sampling", "environment", "mismatch", "partial_rollouts")),
    *(f"tests/run/test_{name}.py" for name in ("retired_prompts", "sources", "starter", "task_page", "teacher")),
    *(f"tests/run/test_{name}.py" for name in ("adapters", "adapters_beside", "budget", "in_flight", "reward_model")),
    "tests/run/test_continued_conversations.py",
)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported by anything
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["COLUMNS"] = "120"  # pages are as wide as into a pipe, whatever terminal runs the tests
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # as in an activated environment
os.environ.pop("WANDB_API_KEY", None)  # a test must never write to someone's account

_TEMPORARY = Path(tempfile.gettempdir())
_SPENT = pytest.StashKey[float]()  # processor seconds before a test
_spent_before = {"seconds": 0.0}  # at the end of the test before, or of the collection

# A busy machine is no reason to fail.
settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")


def tier(item: pytest.Item) -> str:
    """Name of the folder below tests/ that a test is in."""
    return item.path.relative_to(Path(__file__).parent).parts[0]


class Lanes(LoadScopeScheduling):
    """The scheduler of the workers: what stays together is a tier, or a file."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::")[0]
        name = Path(path).relative_to("tests").parts[0]
        return name if name in SHARED and path not in ALONE else path


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name bytes by their parameter: what a test writes may hold the time, and all workers need the same names."""
    return argname if isinstance(val, bytes) else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Give pytest-xdist this scheduler: its own keeps files together, or nothing, but no tiers."""
    return Lanes(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Have all processes put their temporary files where they are removed, also those that a test kills."""
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_TEMPORARY))  # pytest's own folders stay for who looks at them
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="gspo-hpc-")
    tempfile.tempdir = os.environ["TMPDIR"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that any worker may take last, so that none has a long tier before it while the others are idle."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: f"tests/{item.path.relative_to(Path(__file__).parent).as_posix()}" in ALONE)


def pytest_collection_finish() -> None:
    """Keep the collector from going through modules and tests again and again: they stay to the end."""
    gc.freeze()
    _spent_before["seconds"] = _processor_seconds()


def pytest_unconfigure() -> None:
    """Remove the temporary files, and let Python end as it does without this file: libraries in C report leaks."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Lower the priority of this worker, and so of all that its tests start, once it runs anything but Slurm."""
    if "PYTEST_XDIST_WORKER" in os.environ and tier(item) != "slurm" and os.nice(0) == 0:
        os.nice(10)


def _processor_seconds() -> float:
    """Return the processor time of this worker and of all processes that it has started and that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note for --junitxml what a test has cost, which does not depend on what else the machine does."""
    if call.when == "setup":
        item.stash[_SPENT] = _spent_before["seconds"]
    if call.when == "teardown":
        _spent_before["seconds"] = _processor_seconds()
        spent = _spent_before["seconds"] - item.stash[_SPENT]
        item.user_properties.append(("processor_seconds", f"{spent:.2f}"))
    return (yield)


def _inherited() -> dict[str, str]:
    """Return the variables of this process that decide what the processes do which it starts.

    Without those that a thread of a pool sets for a moment, while it starts one (gspo_hpc.rewards.spawning).
    """
    names = [name for name in os.environ if name.startswith(("PYTHON", "GSPO_HPC_", "SLURM_"))]
    return {name: value for name in names if (value := os.environ.get(name)) not in (None, "gspo-hpc")}


@pytest.fixture(autouse=True)
def same_environment() -> Generator[None]:
    """A test fails that leaves such a variable behind, or signals blocked: else tests after it do, on its worker."""
    before, blocked = _inherited(), signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    after, still = _inherited(), signal.pthread_sigmask(signal.SIG_BLOCK, [])
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert still == blocked, "close what blocks signals: processes that tests after it start would not get them"
    for name in before.keys() | after.keys():
        os.environ.pop(name, None)
    os.environ.update(before)
    assert after == before, "use monkeypatch.setenv"


@pytest.fixture(scope="session")
def project() -> Path:
    """The top of the project."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    """Holds model/ and data/. Made by the tool that the quickstart uses."""
    project = Path(__file__).parents[1]
    folder = Path(os.environ.get("GSPO_HPC_CACHE", project / ".cache")) / "tiny"
    subprocess.run([sys.executable, str(project / "tools" / "make_tiny_model.py"), "--out", str(folder)], check=True)
    return folder


@pytest.fixture(scope="session")
def tiny_config(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """configs/tiny_cpu.yaml with this machine's folders, updates of half its size (four prompts) and a small cache."""
    project = Path(__file__).parents[1]
    raw = yaml.safe_load((project / "configs" / "tiny_cpu.yaml").read_text())
    raw["model"]["path"] = str(tiny_folder / "model")
    raw["batch"]["global_batch_size"] = 32
    raw["rollout"]["kv_cache_gb"] = 0.03  # far more than is ever used: an engine fills it with zeros at its start
    raw["data"] = {"train": str(tiny_folder / "data" / "train.jsonl"), "eval": str(tiny_folder / "data" / "eval.jsonl")}
    path = tmp_path_factory.mktemp("config") / "tiny_cpu.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path
