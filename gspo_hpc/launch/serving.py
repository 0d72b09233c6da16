"""vLLM's own OpenAI-compatible server, on a checkpoint of a run or on the folder of a model."""

from __future__ import annotations

import ipaddress
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from gspo_hpc.launch.local import export
from gspo_hpc.runs import commit
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.system import environment
from gspo_hpc.system.exit_codes import DONE
from gspo_hpc.system.files import make_inner_dir

_OWN = ("--model", "--host", "--port", "--served-model-name", "--load-format")  # what `serve` itself decides


def option(word: str, names: Iterable[str]) -> str | None:
    """Return which of these options of vLLM a word of its command line is; None for another word.

    vLLM takes underscores for hyphens, and a name of which only the beginning is given.
    """
    name = word.partition("=")[0].replace("_", "-")
    return next((one for one in names if name == one or (len(name) > 3 and one.startswith(name))), None)


def has_key(options: str) -> bool:
    """Return whether options of vLLM, in one text, hold a key that clients have to send."""
    return any(option(word, ("--api-key",)) for word in shlex.split(options))


def command(folder: Path, name: str, host: str, port: int, options: str) -> list[str]:
    """Return the command that serves a model's folder under `name`; `options` are further ones of vLLM's, in one text.

    Raises ValueError for options that cannot be read, or that `serve` itself decides.
    """
    try:
        more = shlex.split(options)
    except ValueError as error:
        raise ValueError(f"--vllm {options!r}: {error}") from None
    if taken := [word for word in more if option(word, _OWN)]:
        raise ValueError(f"--vllm: {taken[0]} is decided by serve: give --host, --port or --name before it")
    # Weights are read from safetensors alone: other formats may run code.
    fixed = ["--host", host, "--port", str(port), "--served-model-name", name, "--load-format", "safetensors"]
    # `vllm serve` looks for a package of the name vllm, which builds for CPUs have not; 0.22 to 0.33 have this module.
    return [*environment.python("vllm.entrypoints.openai.api_server"), "--model", str(folder), *fixed, *more]


def checkpoint(run: Path, step: int | None) -> int:
    """Return the step of a run's checkpoint (default: the newest). Raises ValueError if there is no such checkpoint."""
    steps = {int(path.name) for path in commit.list_committed(RunDir(run).checkpoints)}
    if not steps:
        raise ValueError(f"{run} has no checkpoint yet")
    if step is not None and step not in steps:
        raise ValueError(f"{run} has no checkpoint {step}; it has {', '.join(map(str, sorted(steps)))}")
    return max(steps) if step is None else step


def exported(run: Path, step: int | None) -> Path:
    """Return the Hugging Face folder of a run's checkpoint (default: the newest), which is written if it is missing.

    Raises ValueError if there is no such checkpoint, RuntimeError if it cannot be exported, which has been told.
    """
    chosen = checkpoint(run, step)
    folder = run / "served" / f"{chosen:06d}"
    if not folder.exists():
        make_inner_dir(folder.parent)
        if export(run, chosen, folder) != DONE and not folder.exists():  # another server may have been faster
            raise RuntimeError(f"checkpoint {chosen} of {run} was not exported")
    return folder


def is_loopback(host: str) -> bool:
    """Return whether only processes of this machine reach a server at this host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def become(words: Sequence[str]) -> None:
    """Replace this process with the server, which then gets its signals."""
    sys.stdout.flush()
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", **environment.offline()}
    os.execve(words[0], list(words), os.environ | environment.importing() | quiet)
