"""W&B: whether the run will reach it. A key is looked for, never shown.

Floor 6. Does what tracking.py does when a run begins, without wandb.
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

from gspo_hpc.config import Config
from gspo_hpc.doctor_finding import Finding, Section

SECONDS = 5.0  # that a server may take to answer
_DEFAULT = "https://api.wandb.ai"
_MODES = ("online", "offline", "disabled")


def findings(config: Config, environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """All lines of the group."""
    section = Section("tracking")
    asked = config.tracking.wandb
    variable = environment.get("WANDB_MODE", "")
    if asked == "auto" and variable and variable not in _MODES:
        section.warn("W&B", f"WANDB_MODE is {variable!r}, which is not used", f"one of {', '.join(_MODES)}")
    url = _url(environment)
    host = urlsplit(url).hostname or ""
    found = key_source(host, environment)
    mode = asked if asked != "auto" else variable if variable in _MODES else "online" if found else "offline"
    whose = f"tracking.wandb={asked}" + (f", WANDB_MODE={variable}" if asked == "auto" and variable in _MODES else "")
    if mode == "disabled":
        section.skip("W&B", f"disabled ({whose})")
        return section.findings
    if mode == "offline":
        no_key = " and no key" if not found else ""
        section.ok("W&B", f"offline ({whose}{no_key}): kept in the run directory, for a later `wandb sync`")
        return section.findings
    if not found:
        text = f"online is asked for ({whose}), and there is no key for {host}: the run would log offline"
        section.fail("W&B", text, "wandb login, or WANDB_API_KEY in the shell that starts the run")
        return section.findings
    section.ok("W&B", f"online ({whose}); a key is in {found}")
    if problem := reach(url):
        fix = "a proxy (HTTPS_PROXY), or tracking.wandb=offline and `wandb sync` from a login node"
        section.warn("W&B server", f"{host}: {problem}; the run would log offline", fix)
    else:
        section.ok("W&B server", f"{host} answers")
    return section.findings


def key_source(host: str, environment: Mapping[str, str]) -> str:
    """Where a key for this server is, in words; empty: nowhere."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        if environment.get(name):
            return name
    path = Path(environment.get("NETRC", "~/.netrc")).expanduser()
    try:
        return str(path) if netrc.netrc(path).authenticators(host) is not None else ""
    except (OSError, netrc.NetrcParseError):
        return ""


def reach(url: str, seconds: float = SECONDS) -> str:
    """What is in the way of a connection to a server; empty: nothing. Behind a proxy only the proxy is tried."""
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
    """The server: of the environment, of wandb's own settings, or the public one."""
    if url := environment.get("WANDB_BASE_URL"):
        return url
    folder = Path(environment.get("WANDB_CONFIG_DIR", "~/.config/wandb")).expanduser()
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read([folder / "settings", Path("wandb/settings")])
        return parser.get("default", "base_url", fallback=_DEFAULT)
    except (configparser.Error, OSError, UnicodeDecodeError):
        return _DEFAULT
