"""The W&B server and key that a run will have, and its mode, without importing wandb. A key is never returned.

wandb reads them from the environment, from its own settings files, and from the netrc file.
"""

from __future__ import annotations

import configparser
import netrc
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

MODES = ("online", "offline", "disabled")
_URL = "https://api.wandb.ai"
# Settings of wandb that name credentials; in the environment they are in upper case, after WANDB_.
_CREDENTIALS = ("api_key", "identity_token_file")


def mode(asked: str, has_key: bool, environment: Mapping[str, str]) -> str:
    """Return the mode that tracking.wandb asks for: WANDB_MODE decides for `auto`, or else whether there is a key.

    A run that is to be online and has no key logs offline.
    """
    if asked != "auto":
        return asked
    variable = environment.get("WANDB_MODE", "")
    return variable if variable in MODES else "online" if has_key else "offline"


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what wandb's settings files say: that of the working directory before the user's.

    wandb reads them before it looks at the environment, so WANDB_DIR does not count here.
    """
    own = Path(".wandb" if Path(".wandb").exists() else "wandb")
    found: dict[str, str] = {}
    for place in (Path(environment.get("WANDB_CONFIG_DIR", "~/.config/wandb")).expanduser(), own):
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read(place / "settings")
            found |= dict(parser.items("default"))
        except (configparser.Error, OSError, UnicodeDecodeError):  # as wandb does, which takes what it can read
            pass
    return found


def server(environment: Mapping[str, str], given: Mapping[str, str]) -> str:
    """Return the server that the environment or wandb's settings name, or else the public one."""
    return environment.get("WANDB_BASE_URL") or given.get("base_url") or _URL


def key_source(url: str, environment: Mapping[str, str], given: Mapping[str, str | None]) -> str:
    """Return where a key for this server is, in words; empty if there is none. `given` are wandb's settings."""
    for name in _CREDENTIALS:
        if environment.get(variable := f"WANDB_{name.upper()}"):
            return variable
        if given.get(name):
            return f"{name} of wandb's settings"
    path, parts = Path(environment.get("NETRC", "~/.netrc")).expanduser(), urlsplit(url)
    try:
        names = netrc.netrc(path)
    except (OSError, netrc.NetrcParseError):
        return ""
    # `wandb login` writes the port of a server beside its name.
    return str(path) if any(names.authenticators(one or "") for one in (parts.netloc, parts.hostname)) else ""
