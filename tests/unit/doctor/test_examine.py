"""The command doctor: what it prints, its exit codes, and what it finds of this machine, its files and W&B."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config import loader
from gspo_hpc.doctor import examine
from gspo_hpc.doctor import files as doctor_files
from gspo_hpc.doctor import finding as doctor_finding
from gspo_hpc.doctor import host as doctor_host
from gspo_hpc.doctor import tracking as doctor_tracking
from gspo_hpc.doctor.finding import GROUPS, STATES, Finding, Section
from gspo_hpc.doctor.host import Space
from gspo_hpc.doctor.node import Machine
from gspo_hpc.launch import mounts
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.system import host_memory

GIB = 2**30
HEAVY = ("torch", "vllm", "megatron", "wandb", "transformers", "pyarrow", "submitit")
UNLIMITED = resource.RLIM_INFINITY
LIMITS = {name: (UNLIMITED, UNLIMITED) for name in ("NOFILE", "NPROC", "MEMLOCK", "AS")} | {"CORE": (0, UNLIMITED)}
SECRET = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Nobody's W&B, and no Slurm."""
    for name in (
        "WANDB_MODE",
        "WANDB_API_KEY",
        "WANDB_BASE_URL",
        "WANDB_IDENTITY_TOKEN_FILE",
        "SLURM_JOB_ID",
        "SLURM_CONF",
    ):
        monkeypatch.delenv(name, raising=False)
    for name in ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb"))
    return monkeypatch


@pytest.fixture
def config(tiny_config: Path, tmp_path: Path, no_account: pytest.MonkeyPatch) -> list[str]:
    """CONFIG and settings of a run that would work here."""
    return [str(tiny_config), f"run.dir={tmp_path}/runs/x"]


def look(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """Exit code and object of `doctor ... --json`."""
    code = main(["doctor", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def one(section: Section) -> Finding:
    (found,) = section.findings
    return found


def test_a_run_that_would_work(config: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, told = look(config, capsys)
    assert [item for item in told["findings"] if item["state"] in ("fail",)] == []
    assert (code, told["ok"], told["platform"], told["place"], told["nodes"]) == (0, True, "cpu", "node", None)
    assert list(told) == ["ok", "config", "platform", "place", "counts", "findings", "nodes"]
    assert told["counts"] == {state: sum(f["state"] == state for f in told["findings"]) for state in STATES}
    assert all(list(item) == ["group", "check", "state", "finding", "fix"] for item in told["findings"])
    assert all(item["fix"] for item in told["findings"] if item["state"] in ("warn", "fail"))
    groups = [item["group"] for item in told["findings"]]
    assert groups == sorted(groups, key=GROUPS.index)
    checks = {(item["group"], item["check"]) for item in told["findings"]}
    assert {
        *(("versions", "python"), ("versions", "torch"), ("versions", "torchvision"), ("host", "/dev/shm")),
        *(("host", "memory"), ("host", "open files"), ("network", "loopback"), ("files", "write"), ("files", "lock")),
        *(("files", "clock"), ("files", "space"), ("inputs", "model"), ("inputs", "weights"), ("inputs", "plan")),
        *(("inputs", "training data"), ("inputs", "reward functions"), ("tracking", "W&B"), ("slurm", "commands")),
    } <= checks


def test_the_page(config: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["doctor", *config, "model.path=/no/such/folder"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"doctor of {config[0]}, platform cpu"
    assert {"Versions", "Host", "Network", "Files", "Inputs", "Tracking", "Slurm"} <= set(lines)
    at = next(i for i, line in enumerate(lines) if line.startswith("  fail  model"))
    assert "model.path /no/such/folder: no such folder" in lines[at] and "fix: " in lines[at + 1]
    assert lines[at].index("model.path") == lines[at + 1].index("fix: ")
    assert all(len(line) <= 80 or len(line.split()[-1]) > 50 for line in lines[1:])  # a path has no place to break
    assert "\033" not in "".join(lines)
    assert lines[-1].split(", ")[2].startswith("1 fail") and lines[-1].endswith("fix what fails before you start a run")


def test_without_a_config(capsys: pytest.CaptureFixture[str], no_account: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_account.chdir(tmp_path)
    code, told = look([], capsys)
    assert code == 0 and told["config"] is None
    assert not [item for item in told["findings"] if item["group"] == "inputs"]
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


@pytest.mark.parametrize(
    ("compilers", "cc", "header", "found", "state"),
    [
        (["gcc", "clang"], "", True, "gcc", "ok"),
        (["clang"], "", True, "clang", "ok"),
        (["mine"], "mine -O1", True, "mine", "ok"),
        (["gcc"], "mine", True, None, "fail"),  # Triton takes CC as it is
        ([], "", True, None, "fail"),
        (["gcc"], "", False, "gcc", "fail"),
    ],
)
def test_what_triton_builds_kernels_with(
    compilers: list[str], cc: str, header: bool, found: str | None, state: str, tmp_path: Path
) -> None:
    for name in compilers:
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    if header:
        (tmp_path / "Python.h").write_text("")
    path = doctor_host.compiler({"PATH": str(tmp_path)} | ({"CC": cc} if cc else {}))
    assert path == (None if found is None else str(tmp_path / found))
    section = Section("host")
    doctor_host.judge_compiler(section, path, tmp_path / "Python.h")
    (one,) = section.findings
    assert one.state == state
    assert ("there is no" in one.finding) == (state == "fail")


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_compiler_is_looked_for_where_ranks_have_gpus(platform: str) -> None:
    config = loader.load(None, [f"cluster.platform={platform}"])
    checks = {one.check for one in doctor_host.host(config, None, 0).findings}
    assert ("C compiler" in checks) == (platform == "cuda")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["CONFIG", "run.max_step=3"], "unknown key run.max_step; nearest: run.max_steps"),
        (["CONFIG", "cluster.platform=gpu"], "cluster.platform"),
        (["run.max_steps=3"], "the config file comes first"),
        (["CONFIG.yml"], "no such config file"),
        (["CONFIG", "--nodes", "0"], "--nodes is 0; it must be at least 1"),
        (["CONFIG", "--nodes", "two"], "invalid int value: 'two'"),
        (["CONFIG", "--wait", "-1"], "--wait is -1"),
        (["CONFIG", "--nods", "2"], "nearest: --nodes"),
    ],
)
def test_mistakes(words: list[str], text: str, config: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *(word.replace("CONFIG", config[0]) for word in words)]) == 2
    output = capsys.readouterr()
    assert text in output.err and output.out == "" and "Traceback" not in output.err
    assert len([line for line in output.err.splitlines() if not line.startswith(("usage", " "))]) <= 2


def test_no_torch(config: list[str]) -> None:
    script = (
        "import json, sys\nfrom gspo_hpc.cli.main import main\n"
        f"code = main(['doctor', *{config!r}])\n"
        "print(json.dumps([code, sorted(sys.modules)]), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    code, modules = json.loads(done.stderr.splitlines()[-1])
    assert code == 0 and "gspo_hpc.doctor.inputs" in modules
    assert [name for name in modules if name.split(".")[0] in HEAVY] == []


def test_limits_that_were_really_lowered(config: list[str]) -> None:
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    done = subprocess.run(
        [sys.executable, "-m", "gspo_hpc", "doctor", *config, "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lower,
        check=False,
    )
    found = {item["check"]: item for item in json.loads(done.stdout)["findings"] if item["group"] == "host"}
    assert done.returncode == 1
    assert found["open files"]["state"] == "fail" and found["open files"]["finding"].startswith("the limit is 300;")
    assert "hard limit (300)" in found["open files"]["fix"] and found["core files"]["state"] == "ok"


@pytest.mark.parametrize(
    ("limits", "check", "state", "fix"),
    [
        ({"NOFILE": (1024, 65536)}, "open files", "warn", "ulimit -n 65536"),
        ({"NOFILE": (1024, UNLIMITED)}, "open files", "warn", "ulimit -n unlimited"),
        ({"NOFILE": (511, UNLIMITED)}, "open files", "fail", "ulimit -n unlimited"),
        ({"NOFILE": (512, 4096)}, "open files", "warn", "ulimit -n 4096"),
        ({"NOFILE": (4095, 4096)}, "open files", "warn", "ulimit -n 4096"),
        ({"NOFILE": (4096, 4096)}, "open files", "ok", ""),
        ({"NPROC": (512, 4096)}, "processes", "warn", "ulimit -u 4096"),
        ({"NPROC": (4095, 4096)}, "processes", "warn", "ulimit -u 4096"),
        ({"NPROC": (4096, 4096)}, "processes", "ok", ""),
        ({"NPROC": (100, 100)}, "processes", "fail", "LimitNPROC"),
        ({"MEMLOCK": (65536, 65536)}, "locked memory", "warn", "LimitMEMLOCK"),
        ({"AS": (GIB, GIB)}, "virtual memory", "fail", "ulimit -v unlimited"),
        ({"AS": (64 * GIB, UNLIMITED)}, "virtual memory", "warn", "ulimit -v unlimited"),
        ({"CORE": (UNLIMITED, UNLIMITED)}, "core files", "warn", "ulimit -c 0"),
    ],
)
def test_limits(limits: dict[str, tuple[int, int]], check: str, state: str, fix: str) -> None:
    section = Section("host")
    doctor_host.judge_limits(section, LIMITS | limits, needed=2 * GIB, rdma=True)
    found = {item.check: item for item in section.findings}
    assert found[check].state == state and fix in found[check].fix
    assert {item.check for item in section.findings if item.state != "ok"} == ({check} if state != "ok" else set())


@pytest.mark.parametrize(
    ("space", "needed", "state", "fix"),
    [
        (Space(64 * 2**20, 64 * 2**20), 272 * 2**20, "fail", "--shm-size"),
        (Space(8 * GIB, 2**20), 272 * 2**20, "fail", "killed processes"),
        (Space(400 * 2**20, 400 * 2**20), 272 * 2**20, "warn", "--shm-size"),
        (Space(8 * GIB, 8 * GIB), 272 * 2**20, "ok", ""),
        (None, 16 * 2**20, "fail", "mount"),
    ],
)
def test_shared_memory(space: Space | None, needed: int, state: str, fix: str) -> None:
    section = Section("host")
    doctor_host.judge_shm(section, space, needed)
    assert one(section).state == state and fix in one(section).fix


def test_a_small_shared_memory_that_is_really_mounted(tmp_path: Path) -> None:
    """A tmpfs of 1 MiB, in a mount namespace of its own where that is allowed."""
    script = (
        "import sys; from gspo_hpc.doctor import host as d; from gspo_hpc.doctor.finding import Section; "
        "s = Section('host'); d.judge_shm(s, d.space_of(sys.argv[1]), 16 * 2**20); print(s.findings[0].state)"
    )
    mounted = f'mount -t tmpfs -o size=1M none {tmp_path} && exec "$0" -c "$1" {tmp_path}'
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", mounted, sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode and ("unshare" in done.stderr or "mount:" in done.stderr):
        pytest.skip("mount namespaces are not allowed here")  # the numbers are judged above
    assert done.stdout.strip() == "fail", done.stderr


def test_memory() -> None:
    def judged(available: int, needed: int | None) -> Finding:
        section = Section("host")
        doctor_host.judge_memory(section, available, needed, " to this job")
        return one(section)

    assert judged(8 * GIB, None).state == "ok"
    assert judged(8 * GIB, 4 * GIB).state == "ok"
    assert judged(8 * GIB, 7 * GIB).state == "warn"
    assert (
        judged(8 * GIB, 9 * GIB).state == "fail"
        and "8.0 GiB are available to this job" in judged(8 * GIB, 9 * GIB).finding
    )
    section = Section("host")
    doctor_host.judge_memory(section, 8 * GIB, 9 * GIB, sleeping=True)
    assert one(section).fix.startswith("set rollout.sleep_level=2, ")
    assert "sleep_level" not in judged(8 * GIB, 9 * GIB).fix


def cores(count: int, *words: str, in_job: bool = False) -> Finding:
    section = Section("host")
    doctor_host.judge_cores(section, loader.load(None, list(words)), count, in_job=in_job)
    return one(section)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9, 16, 31])
@pytest.mark.parametrize("words", [(), ("rollout.tensor_parallel_size=2",), ("reward.workers=5",)])
def test_what_is_advised_for_few_cores_is_enough(ranks: int, count: int, words: tuple[str, ...]) -> None:
    """Whoever follows the advice gets no other warning, and a plan whose rule about cores holds."""
    words = ("cluster.platform=cuda", f"cluster.gpus_per_node={ranks}", *words)
    found = cores(count, *words)
    if found.state == "ok":
        return
    advice = found.fix.partition(", or ")[2].split()
    if not advice:
        assert found.fix == "use a machine with more cores"
        return
    assert cores(count, *words, *advice).state == "ok", found
    config = loader.load(None, [*words, *advice])
    share = count // config.cluster.gpus_per_node
    if config.rollout.tensor_parallel_size == 1:  # else ranks share the node's cores
        held = make_plan(loader.load(None, [*words, *advice, f"slurm.cpus_per_task={share}"]))
        assert "cpus_per_task_suffice" not in {item.rule for item in held.broken}, found


def test_too_few_cores() -> None:
    eight = ("cluster.platform=cuda", "cluster.gpus_per_node=8")
    found = cores(9, *eight)
    assert found.state == "warn" and "there are 9 cores, and 32 processes of a node are busy" in found.finding
    assert found.fix == "use a machine with more cores, or cluster.gpus_per_node=2"
    assert cores(32, *eight).state == "ok" and cores(31, *eight).state == "warn"
    assert cores(3, *eight).fix == "use a machine with more cores, or cluster.gpus_per_node=1 reward.workers=1"
    assert cores(2, *eight).fix == "use a machine with more cores"
    assert cores(2, "cluster.platform=cpu", "cluster.gpus_per_node=4").fix.endswith("or cluster.gpus_per_node=2")


def test_a_task_of_a_job_needs_the_cores_of_a_rank() -> None:
    """The check of a node runs in a task of its own, which has the cores of one rank, not those of the node."""
    words = ("cluster.platform=cuda", "cluster.gpus_per_node=8")
    assert cores(4, *words, in_job=True).state == "ok"
    few = cores(3, *words, in_job=True)
    assert few.state == "warn" and "3 cores for a task, which asks for 4" in few.finding
    assert cores(1, "cluster.platform=cpu", "cluster.gpus_per_node=8", in_job=True).finding == "1 core"


def test_cached_files_do_not_count_as_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a job has read or written stays in its control group as cache, which the kernel gives back."""
    monkeypatch.setattr(host_memory, "ROOT", tmp_path)
    group = tmp_path / "sys/fs/cgroup/job"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemAvailable: {60 << 20} kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    (group / "memory.current").write_text(str(19 * GIB))
    (group / "memory.max").write_text(str(20 * GIB))
    (group / "memory.stat").write_text(f"inactive_file {12 * GIB}\n")
    found = {finding.check: finding for finding in doctor_host.host(loader.from_dict({}), 8 * GIB, 0).findings}
    assert found["memory"].state == "ok" and "13.0 GiB are available to this job" in found["memory"].finding


@pytest.mark.parametrize(
    ("skew", "state"), [(0.1, "ok"), (-0.9, "ok"), (1.5, "warn"), (-30.0, "warn"), (-61.0, "fail")]
)
def test_clocks(skew: float, state: str) -> None:
    section = Section("host")
    doctor_host.judge_clock(section, skew, "n1")
    assert one(section).state == state and "n1" in one(section).finding
    if state != "ok":
        assert ("ahead of" in one(section).finding) == (skew > 0)


def test_inodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few are a warning; a file system that does not count them (btrfs) has no line."""
    config = loader.load(None, [f"run.dir={tmp_path}/x"])

    def inodes() -> str:
        found = {one.check: one.state for one in doctor_files.findings(config, 1, None)}
        return found.get("inodes", "")

    real = os.statvfs

    def with_inodes(count: int, free: int) -> None:
        def changed(path: Any) -> Any:
            names = ("f_frsize", "f_bavail", "f_blocks")
            return SimpleNamespace(**{name: getattr(real(path), name) for name in names}, f_files=count, f_favail=free)

        monkeypatch.setattr(os, "statvfs", changed)

    for count, free, state in ((10**6, 10**5, "ok"), (10**6, 9_999, "warn"), (0, 0, "")):
        with_inodes(count, free)
        assert inodes() == state


def test_the_clock_of_a_file_system(tmp_path: Path) -> None:
    assert abs(doctor_host.skew_of(tmp_path)) < 1.0
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = {item.check: item for item in doctor_host.network(1, port).findings}
    assert found["loopback"].state == "fail" and "in use" in found["loopback"].finding.lower()
    assert "ss -ltnp" in found["loopback"].fix
    assert doctor_host.try_port("127.0.0.1") is None
    assert doctor_host.try_port("203.0.113.1") is not None  # no address of this machine


def test_few_ports() -> None:
    """A thousand are enough."""
    for low, high, state in (
        (32768, 60999, "ok"),
        (60000, 60999, "ok"),
        (60000, 60998, "warn"),
        (60000, 60500, "warn"),
    ):
        section = Section("network")
        doctor_host.judge_ports(section, low, high)
        assert one(section).state == state
    assert "only 501 ports (60000 to 60500)" in one(section).finding


def test_host_names() -> None:
    def judged(addresses: list[str], nodes: int) -> str:
        section = Section("network")
        doctor_host.judge_names(section, "n1", addresses, nodes)
        assert bool(one(section).fix) == (one(section).state != "ok")
        return one(section).state

    assert judged(["127.0.1.1", "10.0.0.7"], 4) == "ok"
    assert (judged(["127.0.1.1"], 4), judged(["127.0.1.1"], 1)) == ("warn", "ok")
    assert (judged([], 4), judged([], 1)) == ("fail", "warn")
    assert doctor_host.addresses_of("no-such-host.invalid") == []


def test_a_run_folder_that_cannot_be(config: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    code, told = look([*config, f"run.dir={file}/runs/x"], capsys)
    found = {item["check"]: item for item in told["findings"] if item["group"] == "files"}
    assert code == 1 and found["run folder"]["state"] == "fail" and str(file) in found["run folder"]["finding"]
    code, told = look([*config, "run.dir=/proc/runs/x"], capsys)  # a file system in which nobody makes a folder
    found = {item["check"]: item for item in told["findings"] if item["group"] == "files"}
    assert (
        code == 1 and found["write"]["state"] == "fail" and "/proc: cannot create a folder" in found["write"]["finding"]
    )


def test_what_is_tried_in_the_run_folder(tmp_path: Path) -> None:
    config = loader.load(None, [f"run.dir={tmp_path}/a/b/c", "cluster.platform=cpu"])
    found = {item.check: item for item in doctor_files.findings(config, 1, None)}
    assert {found[check].state for check in ("write", "lock", "space", "clock")} == {"ok"}
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    assert doctor_files.run_folder(config) == tmp_path / "a" / "b" / "c"


def test_space_for_checkpoints() -> None:
    def judged(free: int, checkpoint: int | None) -> str:
        section = Section("files")
        doctor_files.judge_space(section, free, checkpoint, keep=2)
        return one(section).state

    assert [judged(free * GIB, 10 * GIB) for free in (9, 10, 29, 30)] == ["fail", "warn", "warn", "ok"]
    assert [judged(free, None) for free in (2**20, GIB)] == ["warn", "ok"]


MOUNTS = r"""
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,errors=remount-ro
30 22 0:25 / /home rw,relatime shared:5 - nfs4 server:/home rw,vers=4.2,local_lock=none,addr=10.0.0.1
31 22 0:26 / /scratch\040one rw,relatime shared:6 - lustre 10.0.0.2@tcp:/x rw,flock,lazystatfs
32 22 0:27 / /old rw,relatime - nfs server:/old rw,vers=3,nolock,local_lock=all
33 22 0:28 / /dev/shm rw,nosuid - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "alone", "together"),
    [
        ("/home/me/runs", "nfs4", "ok", "ok"),
        ("/homes", "ext4", "ok", "warn"),
        ("/scratch one/runs", "lustre", "ok", "ok"),
        ("/old", "nfs", "ok", "fail"),
        ("/dev/shm/runs", "tmpfs", "warn", "warn"),
    ],
)
def test_mounts(path: str, kind: str, alone: str, together: str) -> None:
    mount = mounts.mount_of(Path(path), MOUNTS)
    assert mount is not None and mount.kind == kind
    for nodes, state in ((1, alone), (4, together)):
        section = Section("files")
        doctor_files.judge_mount(section, Path(path), mount, nodes)
        assert one(section).state == state, one(section)
    section = Section("files")
    doctor_files.judge_mount(section, Path(path), mount, 4, met=True)  # nodes try it; locks of one node stay wrong
    assert one(section).state == ("fail" if together == "fail" else "ok")


def tracking(**environment: str) -> dict[str, Finding]:
    asked = environment.pop("asked", "auto")
    found = doctor_tracking.findings(loader.load(None, [f"tracking.wandb={asked}"]), environment)
    return {item.check: item for item in found}


@pytest.fixture
def server(no_account: pytest.MonkeyPatch) -> Iterator[str]:
    """Something that listens where W&B would."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=lambda: listening.accept(), daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_no_key_for_wandb(tmp_path: Path, config: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    nothing = {"NETRC": str(tmp_path / "netrc"), "WANDB_CONFIG_DIR": str(tmp_path)}
    assert "offline" in tracking(**nothing)["W&B"].finding and tracking(**nothing)["W&B"].state == "ok"
    absent = tracking(asked="online", **nothing)["W&B"]
    assert absent.state == "fail" and "no key for api.wandb.ai" in absent.finding and "wandb login" in absent.fix
    assert tracking(asked="disabled", **nothing)["W&B"].state == "skip"
    assert tracking(WANDB_MODE="disabled", **nothing)["W&B"].state == "skip"
    assert tracking(asked="offline", WANDB_MODE="online", **nothing)["W&B"].state == "ok"
    code, told = look([*config, "tracking.wandb=online"], capsys)
    assert code == 1 and [item["check"] for item in told["findings"] if item["state"] == "fail"] == ["W&B"]


def test_a_key_is_found_and_never_shown(tmp_path: Path, server: str, no_account: pytest.MonkeyPatch) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine 127.0.0.1 login user password {SECRET}\n")
    netrc.chmod(0o600)
    found = tracking(NETRC=str(netrc), WANDB_BASE_URL=server)
    assert found["W&B"].state == "ok" and str(netrc) in found["W&B"].finding
    assert found["W&B server"].state == "ok"
    by_variable = tracking(WANDB_API_KEY=SECRET, WANDB_BASE_URL="http://127.0.0.1:9")
    assert "WANDB_API_KEY" in by_variable["W&B"].finding
    away = by_variable["W&B server"]
    assert away.state == "warn" and "refused" in away.finding and "offline" in away.fix
    assert SECRET not in str(found) + str(by_variable)
    netrc.write_text(f"machine {server.removeprefix('http://')} login user password {SECRET}\n")
    with_port = tracking(NETRC=str(netrc), WANDB_BASE_URL=server)  # as `wandb login` writes it
    assert "logs online" in with_port["W&B"].finding
    elsewhere = tracking(NETRC=str(netrc), WANDB_BASE_URL="http://localhost:9", asked="online")
    assert elsewhere["W&B"].state == "fail"  # a key for another server


def test_libraries_of_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = loader.load(None, ["tracking.wandb=disabled", "tracking.mlflow=true", "notify.urls=[env:NOTES]"])
    assert [(item.check, item.state) for item in doctor_tracking.findings(config, {})][:2] == [
        ("MLflow", "ok"),
        ("notifications", "ok"),
    ]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    missing = doctor_tracking.findings(config, {})[:2]
    assert [(item.state, item.fix) for item in missing] == [("warn", "gspo_hpc[mlflow]"), ("warn", "gspo_hpc[notify]")]


def test_the_server_of_wandbs_own_settings(tmp_path: Path, no_account: pytest.MonkeyPatch) -> None:
    (tmp_path / "settings").write_text("[default]\nbase_url = http://wandb.example:8080\n")
    found = tracking(asked="online", WANDB_CONFIG_DIR=str(tmp_path), NETRC=str(tmp_path / "netrc"))
    assert "no key for wandb.example" in found["W&B"].finding


def test_a_key_in_wandbs_own_settings_is_one(tmp_path: Path, server: str, no_account: pytest.MonkeyPatch) -> None:
    """The run takes it, too; so does the file of the working directory, before the user's."""
    no_account.chdir(tmp_path)
    where = {"WANDB_CONFIG_DIR": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    (tmp_path / "settings").write_text(f"[default]\nbase_url = http://wandb.example:8080\napi_key = {SECRET}\n")
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text(f"[default]\nbase_url = {server}\n")
    found = tracking(asked="online", **where)
    assert found["W&B"].state == "ok" and "api_key of wandb's settings" in found["W&B"].finding
    assert found["W&B server"].state == "ok" and SECRET not in str(found)
    assert "logs online" in tracking(**where)["W&B"].finding
    (tmp_path / "wandb" / "settings").write_text("no section\n")  # wandb then takes the other
    assert "wandb.example does not answer" in tracking(**where)["W&B server"].finding


def test_on_a_login_node_its_own_lacks_are_warnings() -> None:
    machine = Machine(
        [Finding("host", "/dev/shm", "fail", "small", "fix"), Finding("files", "write", "fail", "x", "y")], {}
    )
    host, files = examine._softened(machine)
    assert host.state == "warn" and "no rank runs" in host.finding and files.state == "fail"


def test_what_hangs_is_left() -> None:
    gate = threading.Event()

    def hang() -> list[Finding]:
        gate.wait(60.0)
        return []

    (found,) = doctor_finding.within("files", hang, seconds=0.05)
    gate.set()
    assert (found.state, found.check) == ("fail", "all") and "no answer" in found.finding

    def broken() -> list[Finding]:
        raise OSError(5, "Input/output error", "/x")

    (found,) = doctor_finding.within("files", broken)
    assert found.state == "fail" and "Input/output error" in found.finding

    def bug() -> list[Finding]:
        raise KeyError("ours")

    with pytest.raises(KeyError):  # is no finding about the machine
        doctor_finding.within("files", bug)


def test_findings_travel_as_json() -> None:
    finding = Finding("host", "memory", "warn", "little", "more")
    assert doctor_finding.from_json(json.loads(json.dumps(finding.to_json()))) == finding
    for raw in ({}, finding.to_json() | {"state": "good"}, finding.to_json() | {"fix": 3}):
        with pytest.raises(ValueError, match="not a finding"):
            doctor_finding.from_json(raw)


def test_the_page_of_docs_names_every_group_and_key(project: Path) -> None:
    text = (project / "docs" / "doctor.md").read_text()
    assert all(f"`{group}`" in text for group in GROUPS) and all(f"`{state}`" in text for state in STATES)
    assert all(f"`{key}`" in text for key in examine.Diagnosis(None, "cpu", "node").to_json())
