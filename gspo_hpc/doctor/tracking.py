"""Checks of trackers: that their libraries are installed; the mode that W&B will have, its key, and its server.

A key is never shown.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import ssl
from collections.abc import Mapping
from urllib.parse import urlsplit

from gspo_hpc.config.reading import wandb_account
from gspo_hpc.config.reading.wandb_account import MODES
from gspo_hpc.config.schema import Config
from gspo_hpc.doctor.finding import Finding, Section

SECONDS = 5.0  # a server may take this long to answer


def findings(config: Config, environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """Return the findings of the group."""
    section = Section("tracking")
    for name, library, wanted in (
        ("TensorBoard", "tensorboard", config.tracking.tensorboard),
        ("MLflow", "mlflow", config.tracking.mlflow),
        ("Trackio", "trackio", config.tracking.trackio),
        ("SwanLab", "swanlab", config.tracking.swanlab != "disabled"),
        ("notifications", "apprise", bool(config.notify.urls)),
    ):
        if wanted and importlib.util.find_spec(library) is None:
            extra = {"apprise": "notify", "tensorboard": "cpu] or [gpu"}.get(library, library)
            section.warn(name, f"{library} is not installed, so the run goes on without it", f"gspo_hpc[{extra}]")
        elif wanted:
            section.ok(name, f"{library} is installed")
    asked = config.tracking.wandb
    variable = environment.get("WANDB_MODE", "")
    if asked == "auto" and variable and variable not in MODES:
        section.warn(
            "W&B",
            f"WANDB_MODE is {variable!r}, which is ignored",
            f"set it to {', '.join(MODES[:-1])} or {MODES[-1]}",
        )
    given = wandb_account.settings(environment)
    url = wandb_account.server(environment, given)
    host = urlsplit(url).hostname or ""
    found = wandb_account.key_source(url, environment, given)
    mode = wandb_account.mode(asked, bool(found), environment)
    whose = f"tracking.wandb={asked}" + (f", WANDB_MODE={variable}" if asked == "auto" and variable in MODES else "")
    if mode == "disabled":
        section.skip("W&B", f"W&B is disabled ({whose})")
        return section.findings
    if mode == "offline":
        no_key = ", and there is no key" if not found else ""
        section.ok("W&B", f"the run logs offline ({whose}{no_key}); `gspo-hpc sync RUN` sends it later")
        return section.findings
    if not found:
        text = f"the run should log online ({whose}), but there is no key for {host}, so it would log offline"
        section.fail("W&B", text, "wandb login, or set WANDB_API_KEY in the shell that starts the run")
        return section.findings
    section.ok("W&B", f"the run logs online ({whose}); the key is in {found}")
    if problem := reach(url):
        fix = "set a proxy (HTTPS_PROXY), or set tracking.wandb=offline and run `gspo-hpc sync RUN` on a login node"
        section.warn("W&B server", f"{host} does not answer ({problem}), so the run would log offline", fix)
    else:
        section.ok("W&B server", f"{host} answers")
    return section.findings


def reach(url: str, seconds: float = SECONDS) -> str:
    """Connect to a server; return the error, or an empty text. Behind a proxy only the proxy is tried."""
    parts = urlsplit(url)
    proxy = os.environ.get(f"{parts.scheme}_proxy") or os.environ.get(f"{parts.scheme.upper()}_PROXY")
    at = urlsplit(proxy if "//" in proxy else f"//{proxy}") if proxy else parts
    try:
        port = at.port or (443 if at.scheme == "https" else 80)
        with socket.create_connection((at.hostname or "", port), timeout=seconds) as plain:
            if parts.scheme == "https" and not proxy:
                with ssl.create_default_context().wrap_socket(plain, server_hostname=parts.hostname):
                    pass
    except (OSError, ValueError) as error:
        return str(getattr(error, "strerror", None) or error or type(error).__name__)
    return ""
