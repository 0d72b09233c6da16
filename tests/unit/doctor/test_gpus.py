"""GPUs by NVML: the real nvidia-ml-py, without a driver and with a stub that stands in for the driver's library.

The stub implements functions of libnvidia-ml.so.1 as NVIDIA's nvml.h declares them, and answers for two GPUs. Its
values are typed in, since no machine of the tests has a GPU; the tests hold our calls and the mapping of their answers.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.doctor.finding import Finding
from gspo_hpc.doctor.gpus import judging, reading, smi
from gspo_hpc.doctor.gpus.found import Gpu, Gpus, Link, Slice

SCRIPT = """
import dataclasses, json
from gspo_hpc.doctor.gpus import reading
print(json.dumps(dataclasses.asdict(reading.read())))
"""
STUB = r"""
#include <string.h>
typedef struct {{ unsigned long long total, free, used; }} Memory;
typedef struct {{ unsigned pid; unsigned long long used; unsigned instance, compute; }} Process;
static int devices[2] = {{0, 1}};
int nvmlInitWithFlags(unsigned flags) {{ return {init}; }}
int nvmlInit_v2(void) {{ return {init}; }}
int nvmlShutdown(void) {{ return 0; }}
int nvmlSystemGetDriverVersion(char *text, unsigned size) {{ strncpy(text, "570.124.06", size); return 0; }}
#ifndef OLD
int nvmlSystemGetCudaDriverVersion_v2(int *version) {{ *version = 12080; return 0; }}
#endif
int nvmlDeviceGetCount_v2(unsigned *count) {{ *count = 2; return 0; }}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, int **device) {{ *device = &devices[index]; return 0; }}
int nvmlDeviceGetName(int *device, char *text, unsigned size) {{
    strncpy(text, "NVIDIA H100 80GB HBM3", size);
    return 0;
}}
int nvmlDeviceGetUUID(int *device, char *text, unsigned size) {{
    strncpy(text, *device > 9 ? "MIG-6f0e1f3c-0000" : *device ? "GPU-6f0e1f3c-bbbb" : "GPU-6f0e1f3c-aaaa", size);
    if (*device > 9) text[16] = (char)('0' + *device - 10);
    return 0;
}}
int nvmlDeviceGetMemoryInfo(int *device, Memory *memory) {{
    memory->total = (*device > 9 ? 9728ULL * (*device - 9) : 81559ULL) << 20;
    memory->used = 4ULL << 20, memory->free = memory->total - memory->used;
    return 0;
}}
int nvmlDeviceGetMigMode(int *device, unsigned *current, unsigned *pending) {{
    *current = *device, *pending = 0;  /* on until the next reset */
    return *device ? 0 : 3;  /* NVML_ERROR_NOT_SUPPORTED for the first */
}}
static int slices[3] = {{10, 11, 12}};  /* the second number is of none */
int nvmlDeviceGetMaxMigDeviceCount(int *device, unsigned *count) {{ *count = 3; return 0; }}
int nvmlDeviceGetMigDeviceHandleByIndex(int *device, unsigned index, int **slice) {{
    *slice = &slices[index];
    return index == 1 ? 6 : 0;  /* NVML_ERROR_NOT_FOUND */
}}
int nvmlDeviceGetComputeMode(int *device, int *mode) {{ *mode = *device ? 3 : 0; return 0; }}
int nvmlDeviceGetPersistenceMode(int *device, int *mode) {{ *mode = *device ? 0 : 1; return 0; }}
int nvmlDeviceGetTotalEccErrors(int *device, int kind, int counter, unsigned long long *count) {{
    *count = kind == 1 && counter == 0 ? 5 : 999;
    return *device ? 0 : 3;
}}
int nvmlDeviceGetComputeRunningProcesses_v3(int *device, unsigned *count, Process *found) {{
    if (*device == 0) {{ *count = 0; return 0; }}
    if (*count < 1) {{ *count = 1; return 7; }}  /* NVML_ERROR_INSUFFICIENT_SIZE */
    memset(found, 0, sizeof *found);
    found->pid = 4711, found->used = 1ULL << 30, *count = 1;
    return 0;
}}
int nvmlDeviceGetP2PStatus(int *one, int *other, int kind, int *status) {{
    *status = kind == 2 ? 0 : 6;  /* NVML_P2P_CAPS_INDEX_NVLINK: NVML_P2P_STATUS_OK */
    return 0;
}}
int nvmlDeviceGetTopologyCommonAncestor(int *one, int *other, int *level) {{ *level = 50; return 0; }}
int nvmlSystemGetProcessName(unsigned pid, char *text, unsigned size) {{
    strncpy(text, "/opt/tools/bin/python", size);
    return 0;
}}
const char *nvmlErrorString(int code) {{ return "Driver Not Loaded"; }}
"""


def answers(folder: Path, init: int = 0, *options: str) -> dict[str, Any]:
    """Return what reading.read returns in a process that finds the stub first; NVML's start returns the code `init`."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler to build the stub of the driver's library")
    (folder / "stub.c").write_text(STUB.format(init=init))
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", *options, "-o", library, folder / "stub.c"], check=True, timeout=60)
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder), "PATH": str(folder)}  # and no nvidia-smi
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_no_driver_is_installed() -> None:
    """The real package looks for the library, and there is none."""
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        pass
    else:
        pytest.skip("this machine has an NVIDIA driver")
    found = reading.read()
    assert not found.installed and found.gpus == () and "no NVIDIA driver is installed" in found.error
    (finding,) = judging.judge(found, 2).findings
    assert finding.state == "fail" and finding.fix.startswith("set cluster.platform=cpu")


def test_what_nvml_answers_is_mapped(tmp_path: Path) -> None:
    pytest.importorskip("pynvml")
    found = answers(tmp_path)
    first, second = found["gpus"]
    assert first == {
        "index": 0,
        "name": "NVIDIA H100 80GB HBM3",
        "uuid": "GPU-6f0e1f3c-aaaa",
        "memory": 81559 * 2**20,
        "used": 4 * 2**20,
        "mig": False,
        "ecc_errors": None,  # not supported
        "compute_mode": "Default",
        "persistence": True,
        "driver": "570.124.06",
        "slices": [],
    }
    assert second["slices"] == [
        {"uuid": "MIG-6f0e1f3c-0000", "memory": 9728 * 2**20},
        {"uuid": "MIG-6f0e1f3c-0002", "memory": 3 * 9728 * 2**20},
    ]
    assert (second["uuid"], second["mig"], second["ecc_errors"]) == ("GPU-6f0e1f3c-bbbb", True, 5)
    assert (second["compute_mode"], second["persistence"]) == ("Exclusive_Process", False)
    app = {"uuid": "GPU-6f0e1f3c-bbbb", "pid": 4711, "name": "/opt/tools/bin/python", "used": 2**30}
    assert (found["apps"], found["cuda"], found["error"], found["installed"]) == ([app], "12.8", "", True)
    link = {"first": 0, "second": 1, "nvlink": True, "path": "the link between CPUs"}
    assert found["links"] == [link]


def test_a_driver_that_does_not_answer(tmp_path: Path) -> None:
    pytest.importorskip("pynvml")
    found = answers(tmp_path, 9)  # NVML_ERROR_DRIVER_NOT_LOADED
    assert found["installed"] and found["error"].startswith("the NVIDIA driver does not answer: Driver Not Loaded")
    (finding,) = judging.judge(Gpus(error=found["error"]), 2).findings
    assert finding.state == "fail" and "dmesg" in finding.fix


def test_a_driver_that_is_too_old_is_asked_through_nvidia_smi(tmp_path: Path) -> None:
    """A library without a function that the package calls; nvidia-smi is not there either, which is then said."""
    pytest.importorskip("pynvml")
    assert answers(tmp_path, 0, "-DOLD")["error"] == "nvidia-smi is not installed"


def linked(count: int, pairs: list[tuple[int, int]], path: str = "a PCIe host bridge") -> Gpus:
    """So many GPUs, of which these pairs have NVLink."""
    one = Gpu(0, "A100", "u", 80 << 30, 0, False, 0, "Default", True, "570")
    every = tuple(dataclasses.replace(one, index=index, uuid=f"u{index}") for index in range(count))
    both = itertools.combinations(range(count), 2)
    return Gpus(every, links=tuple(Link(*pair, nvlink=pair in pairs, path=path) for pair in both))


@pytest.mark.parametrize(
    ("count", "pairs", "sharing", "state", "told", "fix"),
    [
        (4, list(itertools.combinations(range(4), 2)), 4, "ok", "all 4 GPUs have NVLink to each other", ""),
        (4, [(0, 1), (2, 3)], 2, "ok", "NVLink joins GPUs 0, 1 and 2, 3; others reach each other through a PCIe", ""),
        (4, [(0, 1), (2, 3)], 4, "warn", "and 4 GPUs share every layer", "tensor_model_parallel_size=2 and rollout"),
        (2, [], 1, "ok", "there is no NVLink: GPUs reach each other through a PCIe host bridge", ""),
        (2, [], 2, "warn", "and 2 GPUs share every layer", "parallel.tensor_model_parallel_size=1"),
        (3, [(0, 1), (1, 2)], 2, "warn", "NVLink joins GPUs 0, 1; others", "tensor_model_parallel_size=1"),
    ],
)
def test_links_between_gpus(
    count: int, pairs: list[tuple[int, int]], sharing: int, state: str, told: str, fix: str
) -> None:
    (found,) = [
        one for one in judging.judge(linked(count, pairs), count, None, sharing).findings if one.check == "links"
    ]
    assert found.state == state and told in found.finding and fix in found.fix, found


def test_links_that_are_not_known_or_not_needed() -> None:
    unknown = dataclasses.replace(linked(2, []), links=None)
    states = {one.check: one.state for one in judging.judge(unknown, 2, None, 2).findings}
    assert states["links"] == "skip"
    assert "links" not in {one.check for one in judging.judge(linked(1, []), 1).findings}


def cut(memory: int | None, uuid: str = "MIG-a", count: int = 1) -> Gpus:
    """Return GPUs of 80 GiB with MIG, each of which has one slice of `memory` bytes; None: the driver tells of none."""
    found = linked(count, [])
    slices = None if memory is None else (Slice(uuid, memory),)
    return dataclasses.replace(
        found, gpus=tuple(dataclasses.replace(gpu, mig=True, slices=slices) for gpu in found.gpus)
    )


def judged(found: Gpus, wanted: int | None, rank_bytes: int | None = None) -> dict[str, Finding]:
    return {one.check: one for one in judging.judge(found, wanted, rank_bytes).findings}


@pytest.mark.parametrize(("wanted", "state"), [(1, "warn"), (2, "fail"), (None, "warn")])
def test_what_mig_means_depends_on_the_number_of_ranks(wanted: int | None, state: str) -> None:
    """Without a config it is a statement: nothing is known that it would break."""
    mig = judged(cut(10 << 30, count=2), wanted)["MIG"]
    assert mig.state == state and "no NVLink or peer-to-peer access" in mig.finding and "Duplicate GPU" in mig.finding
    assert "GPUs 0, 1 (2 slices of 10.0 GiB)" in mig.finding
    assert ("a node can have one rank of a run only" in mig.finding) == (state == "warn"), (
        "a run of more nodes has more"
    )


def test_with_mig_a_rank_has_the_memory_of_a_slice() -> None:
    need = 30 << 30  # fits the card, and not its slice
    assert judged(linked(1, []), 1, need)["memory"].state == "ok"
    small = judged(cut(10 << 30), 1, need)["memory"]
    assert small.state == "fail" and "the MIG slice has 10.0 GiB" in small.finding
    assert "a larger slice" in small.fix and "tensor_model" not in small.fix, "which needs more ranks on the node"
    whole = judged(linked(1, []), 1, 90 << 30)["memory"]
    assert whole.state == "fail" and "tensor_model_parallel_size" in whole.fix and "slice" not in whole.fix
    assert judged(cut(40 << 30), 1, need)["memory"].state == "ok"
    unknown = judged(cut(None), 1, need)["memory"]
    assert unknown.state == "skip" and "one MIG slice" in unknown.finding


def test_the_slice_that_a_job_was_given_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cut(10 << 30)
    both = (Slice("MIG-a", 10 << 30), Slice("MIG-b", 40 << 30))
    found = dataclasses.replace(found, gpus=(dataclasses.replace(found.gpus[0], slices=both),))
    assert judged(found, None)["memory"].finding == "10.0 GiB each"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-b")
    assert judged(found, None)["memory"].finding == "40.0 GiB each"


def test_nodes_with_other_slices_differ() -> None:
    assert judging.facts(cut(10 << 30))["GPUs"] == "1 x A100, 80.0 GiB (1 slice of 10.0 GiB)"
    assert judging.facts(cut(20 << 30))["GPUs"] != judging.facts(cut(10 << 30))["GPUs"]


def test_slices_as_nvidia_smi_lists_them() -> None:
    """The text is of NVIDIA's MIG User Guide."""
    text = """GPU 0: A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 1g.5gb+me   Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
GPU 1: A100-SXM4-40GB (UUID: GPU-00000000-d33d-2b2c-524d-9e3d8d2b8a77)
"""
    found = smi.parse_slices(text)
    own = found["GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77"]
    assert [one.uuid[:12] for one in own] == ["MIG-c6d4f1ef", "MIG-cba663e8"]
    assert [round((one.memory or 0) / 2**30, 2) for one in own] == [19.0, 4.75]
    assert found["GPU-00000000-d33d-2b2c-524d-9e3d8d2b8a77"] == ()


def test_a_driver_without_a_gpu_is_said_without_a_config() -> None:
    none = judged(Gpus(), None)["count"]
    assert none.state == "fail" and none.finding == "there is no GPU"
