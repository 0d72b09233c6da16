"""Checks of W&B: the mode that the run will have, its key, and the server. A key is never shown.

The rules are those of training/telemetry/trackers/, without importing wandb.
"""

from __future__ import annotations

import configparser
import netrc
import os
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from gspo_hpc.config.schema import Config
from gspo_hpc.doctor.finding import Finding, Section

SECONDS = 5.0  # a server may take this long to answer
_DEFAULT = "https://api.wandb.ai"
_MODES = ("online", "offline", "disabled")


def findings(config: Config, environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """Return the findings of the group."""
    section = Section("tracking")
    asked = config.tracking.wandb
    variable = environment.get("WANDB_MODE", "")
    if asked == "auto" and variable and variable not in _MODES:
        section.warn(
            "W&B",
            f"WANDB_MODE is {variable!r}, which is ignored",
            f"set it to {', '.join(_MODES[:-1])} or {_MODES[-1]}",
        )
    url = _url(environment)
    host = urlsplit(url).hostname or ""
    found = key_source(host, environment)
    mode = asked if asked != "auto" else variable if variable in _MODES else "online" if found else "offline"
    whose = f"tracking.wandb={asked}" + (f", WANDB_MODE={variable}" if asked == "auto" and variable in _MODES else "")
    if mode == "disabled":
        section.skip("W&B", f"W&B is disabled ({whose})")
        return section.findings
    if mode == "offline":
        no_key = ", and there is no key" if not found else ""
        section.ok("W&B", f"the run logs offline ({whose}{no_key}); upload its directory later with `wandb sync`")
        return section.findings
    if not found:
        text = f"the run should log online ({whose}), but there is no key for {host}, so it would log offline"
        section.fail("W&B", text, "wandb login, or set WANDB_API_KEY in the shell that starts the run")
        return section.findings
    section.ok("W&B", f"the run logs online ({whose}); the key is in {found}")
    if problem := reach(url):
        fix = "set a proxy (HTTPS_PROXY), or set tracking.wandb=offline and run `wandb sync` on a login node"
        section.warn("W&B server", f"{host} does not answer ({problem}), so the run would log offline", fix)
    else:
        section.ok("W&B server", f"{host} answers")
    return section.findings


def key_source(host: str, environment: Mapping[str, str]) -> str:
    """Return where a key for this server is, in words; empty if there is none."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        if environment.get(name):
            return name
    path = Path(environment.get("NETRC", "~/.netrc")).expanduser()
    try:
        return str(path) if netrc.netrc(path).authenticators(host) is not None else ""
    except (OSError, netrc.NetrcParseError):
        return ""


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


def _url(environment: Mapping[str, str]) -> str:
    """Return the server named by the environment or by wandb's own settings, or else the public one."""
    if url := environment.get("WANDB_BASE_URL"):
        return url
    folder = Path(environment.get("WANDB_CONFIG_DIR", "~/.config/wandb")).expanduser()
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read([folder / "settings", Path("wandb/settings")])
        return parser.get("default", "base_url", fallback=_DEFAULT)
    except (configparser.Error, OSError, UnicodeDecodeError):
        return _DEFAULT
