"""Keep secrets out of what is shown or sent elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "[hidden]"
_NAMES = r"token|secret|password|passwd|credentials?|api_?key|access_?key|private_?key"
_SECRET = re.compile(rf"(?:^|[_\-.])(?:{_NAMES})$", re.IGNORECASE)
# In the arguments of a run, addresses that anybody may post to are secrets as well, and tokens of a tokenizer are none.
_GIVEN = re.compile(
    rf"(?:^|[_\-.])(?:{_NAMES}|webhook(?:_?urls?)?|secret_?key|auth_?key|login_?key|wandb_?key)$", re.IGNORECASE
)
_OF_TEXT = re.compile(
    r"(?:^|[_\-.])(?:pad|eos|bos|unk|sep|cls|mask|stop|end|start|image|video|audio|think|special|im_end|im_start|"
    r"per|next|new|turn|tool|answer|eot|response|prompt)_?token$",
    re.IGNORECASE,
)
# Secrets that their own form shows, wherever they stand.
_FORMS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|"
    r"glpat-[\w-]{16,}|AKIA[A-Z0-9]{16}|xox[abprs]-[\w-]{10,}|AIza[\w-]{30,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{10,})"
    r"|(?<=://)[^\s/@:$]+:[^\s/@$]+(?=@)"
    r"|(?<=://)(?:hooks\.slack\.com|open\.(?:feishu\.cn|larksuite\.com)|oapi\.dingtalk\.com|qyapi\.weixin\.qq\.com|"
    r"discord(?:app)?\.com/api/webhooks)/[^\s\"']+"
)
_PAIR = re.compile(  # NAME=value, "name": "value" and --name value within a text
    rf"((?:[\w.\-]*[_\-.]|\b|--)(?:{_NAMES}|webhook(?:_?url)?)[\"']?\s*[:=]\s*[\"']?)([^\s\"',}}$]{{4,}})",
    re.IGNORECASE,
)

# What stands in place of a secret: a variable or a command of a shell, a switch, a number, <a mark>, nothing.
_OPEN = re.compile(r"\$\{?\w+\}?|\$\{\w+:?[-?].*\}|\$\(.*\)|(?i:true|false|none|null|~)|<.*>|[\d.]*")


def redact(value: Any) -> Any:
    """Return a copy of nested mappings and lists in which the text under every key that names a secret is replaced.

    Numbers stay: `micro_batch_tokens` and the like are counts, not secrets.
    """
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if isinstance(inner, str) and _SECRET.search(str(key)) else redact(inner)
            for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [redact(inner) for inner in value]
    return value


def names_secret(name: str) -> bool:
    """Tell whether an argument or a variable of this name holds a secret; tokens of a text are none."""
    return _GIVEN.search(name) is not None and _OF_TEXT.search(name) is None


def hidden(name: str, value: Any) -> Any:
    """Return the value of an argument, a mapping or a list as well, with the texts replaced that are secrets.

    Variables stay: their names are no secrets. So do numbers, which are counts.
    """
    if isinstance(value, Mapping):
        return {key: hidden(str(key), inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(hidden(name, inner) for inner in value)
    return HIDDEN if isinstance(value, str) and names_secret(name) and not _OPEN.fullmatch(value.strip()) else value


def without_secrets(text: str) -> str:
    """Return a text in which what has the form of a secret, or stands behind a name of one, is replaced."""
    text = _FORMS.sub(HIDDEN, text)
    return _PAIR.sub(_pair_without, text)


def _pair_without(match: re.Match[str]) -> str:
    name = match[1].strip("\"' :=-")
    return match[1] + HIDDEN if names_secret(name) and not _OPEN.fullmatch(match[2]) else match[0]
