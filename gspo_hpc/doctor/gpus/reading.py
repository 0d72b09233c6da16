"""The GPUs of this machine, as NVML answers through nvidia-ml-py (module pynvml).

Only where that package is missing, or the driver is too old for it, the text that nvidia-smi prints is read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from gspo_hpc.doctor.gpus import smi
from gspo_hpc.doctor.gpus.found import App, Gpu, Gpus, Link, Slice

_MODES = ("Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process")  # by NVML's number, in nvidia-smi's words
_PATHS = {  # by NVML_TOPOLOGY_*
    **{0: "one board", 10: "one PCIe switch", 20: "several PCIe switches", 30: "a PCIe host bridge"},
    **{40: "the PCIe host bridges of one CPU", 50: "the link between CPUs"},
}


def read() -> Gpus:
    """Return the GPUs of this machine, by NVML or else by nvidia-smi."""
    found = _read_nvml()
    return smi.read() if found is None else found


def _read_nvml() -> Gpus | None:
    """Return NVML's answer; None if nvidia-ml-py is missing, or the driver lacks a function that it calls."""
    try:
        import pynvml as nvml
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:
        return Gpus(error="no NVIDIA driver is installed (there is no libnvidia-ml.so.1)", installed=False)
    except nvml.NVMLError_FunctionNotFound:
        return None
    except nvml.NVMLError as error:
        return Gpus(error=f"the NVIDIA driver does not answer: {error}")
    try:
        version = nvml.nvmlSystemGetDriverVersion()
        cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
        devices = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        gpus = tuple(_nvml_gpu(nvml, index, device, version) for index, device in enumerate(devices))
        apps = tuple(
            App(gpu.uuid, one.pid, _value(nvml, nvml.nvmlSystemGetProcessName, one.pid) or "?", one.usedGpuMemory)
            for gpu, device in zip(gpus, devices, strict=True)
            for one in _value(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, device) or ()
        )
        return Gpus(gpus, apps, f"{cuda // 1000}.{cuda % 1000 // 10}", links=_nvml_links(nvml, devices))
    except nvml.NVMLError_FunctionNotFound:
        return None
    except nvml.NVMLError as error:
        return Gpus(error=f"the NVIDIA driver reports: {error}")
    finally:
        nvml.nvmlShutdown()


def _nvml_gpu(nvml: Any, index: int, device: Any, driver: str) -> Gpu:
    memory = _value(nvml, nvml.nvmlDeviceGetMemoryInfo, device)
    mig = _value(nvml, nvml.nvmlDeviceGetMigMode, device)
    mode = _value(nvml, nvml.nvmlDeviceGetComputeMode, device)
    persistence = _value(nvml, nvml.nvmlDeviceGetPersistenceMode, device)
    cut = mig is not None and mig[0] == nvml.NVML_DEVICE_MIG_ENABLE
    kinds = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    return Gpu(
        index=index,
        name=nvml.nvmlDeviceGetName(device),
        uuid=nvml.nvmlDeviceGetUUID(device),
        memory=None if memory is None else memory.total,
        used=None if memory is None else memory.used,
        mig=cut,
        ecc_errors=_value(nvml, nvml.nvmlDeviceGetTotalEccErrors, device, *kinds),
        compute_mode="[N/A]" if mode is None else _MODES[mode] if mode < len(_MODES) else f"mode {mode}",
        persistence=None if persistence is None else persistence == nvml.NVML_FEATURE_ENABLED,
        driver=driver,
        slices=_nvml_slices(nvml, device) if cut else (),
    )


def _nvml_slices(nvml: Any, device: Any) -> tuple[Slice, ...] | None:
    """Return the MIG instances of a GPU; None where the driver does not tell. Their numbers may have gaps."""
    most = _value(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, device)
    if most is None:
        return None
    found = []
    for number in range(most):
        one = _value(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, device, number)
        if one is not None:
            memory = _value(nvml, nvml.nvmlDeviceGetMemoryInfo, one)
            found.append(Slice(nvml.nvmlDeviceGetUUID(one), None if memory is None else memory.total))
    return tuple(found)


def _nvml_links(nvml: Any, devices: Sequence[Any]) -> tuple[Link, ...] | None:
    """Return the links between the GPUs; None where the driver does not tell."""
    found = []
    try:
        for (first, one), (second, other) in itertools.combinations(enumerate(devices), 2):
            status = _value(nvml, nvml.nvmlDeviceGetP2PStatus, one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            level = _value(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, one, other)
            if status is None:
                return None
            path = _PATHS.get(level, "PCIe")
            found.append(Link(first, second, status == nvml.NVML_P2P_STATUS_OK, path))
    except nvml.NVMLError:  # it is worth no more than a line
        return None
    return tuple(found)


def _value(nvml: Any, call: Callable[..., Any], *arguments: Any) -> Any:
    """Return what NVML answers; None for a value that this GPU, or this user, does not get."""
    try:
        return call(*arguments)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission, nvml.NVMLError_NotFound):
        return None
