"""Configurations of well-known models that ship with the package: a run is planned before its model is there.

configs/NAME.json holds what architecture.parse reads of the config.json of a model on the Hub; configs/variants.json
lists models that have the sizes of one of these, and configs/families.json names by which a family that is not trained
is known although its sizes are not. A base model and its chat model have one entry, the chat model's: they
differ in the longest sequence at most. Nothing but planning uses these: a run reads the folder of its own model.
"""

from __future__ import annotations

import json
import re
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from gspo_hpc.config import paths
from gspo_hpc.models import hub
from gspo_hpc.system import text

_FOLDER = paths.PACKAGE / "models" / "configs"
_VARIANT = re.compile(r"(-instruct|-base|-v0\.1)+$")  # Mixtral-8x7B-Instruct-v0.1
_CHAT = re.compile(r"(-chat|-hf|-v1\.0)+$")  # Llama-2-7b-chat-hf, TinyLlama-1.1B-Chat-v1.0
_SIZE = re.compile(r"\d+(?:\.\d+)?[bm](?![a-z])")
_VERSION = re.compile(r"(v?\d+)(?:\.\d+)?")
_SIZE_OR_ACTIVE = re.compile(r"-a?\d+(?:\.\d+)?[bm](?![a-z])")
# Families as they are named inside other names, with the version that may follow, which is no size.
_MENTION = re.compile(
    r"(?<![a-z])(baichuan|bloom|deepseek|exaone|falcon|gemma|glm|gpt-oss|gpt2|granite|internlm|kimi|llama|minimax|mistral"
    r"|mixtral|nemotron|olmo|olmoe|phi|pythia|qwen|smollm|yi)(?:-?v?(\d+(?:\.\d+)?)(?![\d.]*[bm]?\d*[bmx](?![a-z])))?(?![a-z])"
)
_MADE_OF_OTHERS = re.compile(r"(?<![a-z])(?:distil(?:l|led|lation)?|merged?|slerp|frankenmerge|upscaled)(?![a-z])")
_SENSES = re.compile(r"(?<![a-z])(?:vision|visual|vl|vlm|vla|omni|audio|voice|speech|multimodal|ocr)(?![a-z])")

_MAKERS = {
    "Qwen": "Qwen",
    "Llama": "meta-llama",
    "Mixtral": "mistralai",
    "Mistral": "mistralai",
    "SmolLM2": "HuggingFaceTB",
    "deepseek": "deepseek-ai",
    "TinyLlama": "TinyLlama",
}  # on the Hub

_VARIANTS, _FAMILIES = "variants.json", "families.json"


class Family(NamedTuple):
    """A family of models that are not trained."""

    architecture: str  # as config.json has it
    text_only: bool  # whether its models neither see nor hear


@cache
def names() -> tuple[str, ...]:
    """The models that have a configuration of their own here, such as Qwen3-8B."""
    own = (path.name for path in paths.files(_FOLDER, ".json") if path.name not in (_VARIANTS, _FAMILIES))
    return tuple(sorted(name.removesuffix(".json") for name in own))


@cache
def variants() -> dict[str, dict[str, Any]]:
    """The models whose configuration is that of another: `like` names it, the other keys replace what differs."""
    found: dict[str, dict[str, Any]] = json.loads((_FOLDER / _VARIANTS).read_text("utf-8"))
    return found


def find(path: str) -> str | None:
    """Return the known model that the last part of a path or of a Hub name names.

    Case, hyphens, underscores and points do not count, but in the sizes (Qwen2-57B is not Qwen2.5-7B), nor whether it
    is the base model or the chat model (-Instruct, -chat, -hf).
    """
    plain = _plain(path)
    for wanted in (_squeezed(plain), _squeezed(_CHAT.sub("", plain))):
        found = next((name for name in _known() if _squeezed(name) == wanted and _has_sizes(plain, name)), None)
        if found is not None:
            return found
    return None


def family(path: str) -> Family | None:
    """Return the untrained family that the last part of a path or of a Hub name names; None: it names none for sure.

    The first name in families.json that the last part begins with decides, unless there is a `doubt`.
    """
    return None if doubt(path) is not None else _named(path)[0]


def doubt(path: str) -> str | None:
    """Return why a model's name does not tell its family, although it names one or several; None if it may.

    Distilled and merged models have the name of their teacher, or of one of their parts, first as often as not.
    """
    found, begins, rest = _named(path)
    named = [*([begins] if begins else []), *_mentioned(rest)]
    if len(named) > 1:
        return f"names {' and '.join(named)}"
    if named and (made := _MADE_OF_OTHERS.search(rest)):
        return f"says that it is made of other models ({made[0]})"
    if found is not None and found.text_only and (more := _SENSES.search(rest)):
        return f"says that it is more than a text model ({more[0]})"
    return None


def _named(path: str) -> tuple[Family | None, str, str]:
    """Return the untrained family with whose name the last part of a path begins, that beginning, and what follows."""
    name = _versioned(_plain(path))
    for start, (architecture, kind) in _families().items():
        if begins := _begins_with(start).match(name):
            return Family(architecture, kind == "text"), begins[0], name[begins.end() :]
    return None, "", name


def _mentioned(name: str) -> list[str]:
    """Return the families and their versions that a name names anywhere, each once."""
    found = {(match[1], match[2] or ""): match[0] for match in _MENTION.finditer(name)}
    versioned = {family for family, version in found if version}
    return [text for (family, version), text in found.items() if version or family not in versioned]


@cache
def _begins_with(start: str) -> re.Pattern[str]:
    """Return the pattern of names that begin with that of a family: no letter, digit or further version follows it."""
    return re.compile(re.escape(start).replace(r"\*", ".*") + r"(?![a-z0-9])(?!\.\d)")


class Kinship(IntEnum):
    """Nearness of two models by their names, the nearest first."""

    LINE = 0  # the same name but for the size
    FAMILY = 1  # the same family and generation: Qwen3, Llama-3.x
    MAKER = 2
    NONE = 3


def kinship(path: str, other: str) -> Kinship:
    """Return how near two models are by the last parts of their paths."""
    names = [_plain(path), _plain(other)]
    if len({_SIZE_OR_ACTIVE.sub("", name) for name in names}) == 1:
        return Kinship.LINE
    if len({*map(_generation, names)}) == 1:
        return Kinship.FAMILY
    letters = {re.match("[a-z]*", name)[0] for name in names}  # type: ignore[index]  # it matches always
    return Kinship.MAKER if len(letters) == 1 else Kinship.NONE


def _generation(name: str) -> tuple[str, str]:
    """Return a family and its generation: (qwen3, ""), (llama, 3) of 3 to 3.3, (deepseek, v3), (deepseek, coder)."""
    first, _, rest = name.partition("-")
    second = "" if re.search(r"\d", first) else rest.partition("-")[0]
    version = _VERSION.fullmatch(second)
    return first, version[1] if version else "" if _SIZE.match(second) or re.match(r"\d+x\d", second) else second


def nearest(path: str) -> str | None:
    """The known model whose name is most like the last part of a path; None: none is like it."""
    known = {name.lower(): name for name in _known()}
    found = text.nearest(_plain(path), known, cutoff=0.75)
    return known[found] if found else None


def beside(path: str, name: str) -> str:
    """Return the path of a known model for whoever has the model at `path`: in the same folder, or by its Hub name.

    A model that differs in its size alone keeps what follows the size, such as -Instruct. One that is not beside a
    folder that is there has its Hub name, if its maker is known.
    """
    if kinship(path, name) is Kinship.LINE and (variant := _VARIANT.search(Path(path).name.lower())):
        name += Path(path).name[variant.start() :]
    maker = next((made_by for start, made_by in _MAKERS.items() if name.startswith(start)), None)
    own, local = Path(path), Path(path).with_name(name)
    absent = hub.is_name(path) or (own.is_dir() and not local.is_dir())
    return f"{maker}/{name}" if absent and maker else str(local)


@cache
def content(name: str) -> dict[str, Any]:
    """The config.json of a known model, as far as it is read; not to be changed."""
    if (variant := variants().get(name)) is not None:
        own = {key: value for key, value in variant.items() if key != "like"}
        return content(variant["like"]) | own
    raw: dict[str, Any] = json.loads((_FOLDER / f"{name}.json").read_text("utf-8"))
    return raw


@cache
def _families() -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads((_FOLDER / _FAMILIES).read_text("utf-8"))
    return found


@cache
def _known() -> tuple[str, ...]:
    return (*names(), *variants())


def _squeezed(name: str) -> str:
    return re.sub(r"[-_.]", "", name.lower())


def _has_sizes(name: str, known: str) -> bool:
    """Return whether a name has the sizes of a known one, in which points and hyphens count: Qwen2-57B has no 7B."""
    for size in _SIZE.findall(known.lower()):
        point = "[-.]?" if size.startswith("0.") else "[-.]"  # 06B is no other size
        if not re.search(rf"(?<!\d){size.replace('.', point)}", name):
            return False
    return True


def _versioned(name: str) -> str:
    """Return a name with a point in versions that are written with a hyphen: internlm2-5-7b, qwen2-5-vl."""
    return re.sub(r"(?<=\d)-(?=\d(?:-|$))", ".", name)


def _plain(path: str) -> str:
    name = Path(path).name.lower().replace("_", "-")
    return _VARIANT.sub("", name).removeprefix("meta-")  # meta-llama's older names
