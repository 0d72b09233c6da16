"""The architecture of a model, from its Hugging Face config.json: supported families, and sizes that all else needs.

An architecture or a setting that is not supported is refused by name, never ignored.
Keys are those of Hugging Face's Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen2-MoE and Qwen3-MoE configurations
(transformers 4 and 5 spell the rotary settings and the number of experts differently; both are read).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo_hpc.config.schema import Config
from gspo_hpc.models import catalog, hub
from gspo_hpc.models.parts import Experts, Mixer, Rope, usual
from gspo_hpc.system.text import MALFORMED, parse_json

SUPPORTED = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
)
_BY_MODEL_TYPE = {name.removesuffix("ForCausalLM").lower().replace("moe", "_moe"): name for name in SUPPORTED}
_ROPE_KEYS: dict[str, tuple[str, ...]] = {  # by rope_type: what is read
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    ),
}


@dataclass(frozen=True)
class Architecture:
    """Sizes and switches of a decoder. Lengths in tokens, sizes in elements."""

    family: str  # one of SUPPORTED, but for an outline
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    rope: Rope = field(hash=False)  # caches of estimates hash a model often; parts take long
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    experts: Experts | None = field(default=None, hash=False)
    mixers: tuple[Mixer, ...] = field(default=(), hash=False)  # of all layers; empty: attention of the sizes above
    mlp_matrices: int = 3  # of an MLP that is no expert: two where it has no gate
    first_parameters: int = 0  # on the first pipeline stage beside the embedding: what sees, learned positions
    about: str = ""  # what of the sizes is not exact

    def has_experts(self, layer: int) -> bool:
        """Return whether this layer, counted from 0 over all stages, has experts instead of an MLP."""
        return self.experts is not None and layer not in self.experts.dense_layers


def read(folder: str | Path) -> Architecture:
    """The architecture in `folder`/config.json. ValueError says what is missing or not supported."""
    path = Path(folder) / "config.json"
    return parse(_content(path), str(path))


def outline(folder: str | Path) -> Architecture:
    """The sizes in `folder`/config.json that every family has; the rest is left to who knows the family."""
    path = Path(folder) / "config.json"
    raw = _content(path)
    families = raw.get("architectures") or ["an unnamed architecture"]
    try:
        return _decoder(raw, str(families[0]))
    except KeyError as error:
        raise ValueError(f"{path}: {error.args[0]} is missing") from None


def find(config: Config) -> Architecture | None:
    """Return the architecture that a plan counts with, from the model's folder or else a shipped one.

    Families that are not trained have one, too. Returns None where there is no file, or one without the sizes that
    every model has. Nothing is refused here.
    """
    if config.model.path is None:
        return None
    try:
        raw, _ = planned(config.model.path)
        return None if raw is None else counted(raw)
    except MALFORMED:
        return None


def planned(model_path: str) -> tuple[dict[str, Any] | None, str | None]:
    """The config.json that a plan goes by, if there is one, and what is to be said of it.

    A folder that exists is read itself, and so is a model of the hub in the local cache; else the shipped configuration
    of that name is taken (catalog.py). Raises ValueError for a file that is no JSON object.
    """
    folder = hub.is_name(model_path) and hub.cached(model_path) or Path(model_path)
    path = folder / "config.json"
    try:
        there = folder.exists()
    except OSError:  # such as a folder that one may not look into
        there = True
    if not there and (name := catalog.find(model_path)):
        absent, does = hub.absence(model_path)
        text = f"{model_path} {absent}: this plan uses the config of {name} that comes with gspo_hpc. A run {does}."
        return catalog.content(name), text
    try:
        raw = parse_json(path.read_text(encoding="utf-8"), finite=False)  # as below
    except (FileNotFoundError, NotADirectoryError):
        text = f"{path} is not there: heads, layers, experts and positions of the model are not checked"
        if named_family(model_path) is None:
            text += ", nor whether this version trains it. A local folder with the model's config.json makes both known"
        if (doubt := catalog.doubt(model_path)) is not None and not there:
            text += f". Its name {doubt}: only its config.json tells which model it is"
        near = None if there else catalog.nearest(model_path)
        return None, f"{text}. Nearest model whose config comes with gspo_hpc: {near}." if near else f"{text}."
    except (OSError, ValueError):
        raw = None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} is not a readable JSON object")
    return _checked(raw, str(path)), None


def untrained(model_path: str, provider: str) -> str | None:
    """Return why the model that a plan goes by cannot be trained; None if it can be, or if nothing is known of it."""
    try:
        raw, _ = planned(model_path)
    except ValueError:  # a rule of the plan says so
        return None
    if raw is None:
        return _untrained_family(named_family(model_path), provider)
    if provider != "own":
        part = next((part for part in ("vision_config", "audio_config") if part in raw), None)
        if part is None and not is_block_fp8(raw):
            return _quantized(raw, "16 or 32 bits, and FP8 in blocks")
        return f"it has a {part}, and only text models are trained" if part else None
    try:
        parse(raw)
    except ValueError as error:
        return str(error)
    except (TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        return f"config.json cannot be understood: {error}"
    return None


def named_family(model_path: str) -> catalog.Family | None:
    """Return the untrained family that a model belongs to by its name, where there is no folder to read."""
    try:
        return None if Path(model_path).exists() else catalog.family(model_path)
    except OSError:  # such as a folder that one may not look into
        return None


def _untrained_family(family: catalog.Family | None, provider: str) -> str | None:
    """Return why models of a family are not trained; None if they may be, or if nothing is known of them."""
    if family is None or (provider != "own" and family.text_only):
        return None
    if provider != "own":
        return f"by its name it is a {family.architecture}, and only text models are trained"
    return (
        f"by its name it is a {family.architecture}, which is not supported; supported: {', '.join(SUPPORTED)}. "
        "If its config.json says otherwise, give a local folder that has it"
    )


def _content(path: Path) -> dict[str, Any]:
    try:
        raw = parse_json(path.read_text("utf-8"), finite=False)  # Mamba's time_step_limit ends with Infinity
    except FileNotFoundError:
        raise ValueError(
            f"model.path {path.parent} has no config.json: it must be a Hugging Face model folder"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds {type(raw).__name__}, not the settings of a model")
    return _checked(raw, str(path))


# Sizes in a config.json, and the least of each: what is 0 is then not there, as for null.
_LEAST = {
    **dict.fromkeys(("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"), 1),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings"), 0),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), 0),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "decoder_sparse_step"), 0),
}
_MOST, _MOST_LAYERS = 10**9, 10**4  # nobody's model: a plan must not take minutes, or all memory, for a slip


def _checked(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a config.json with the usual names of sizes. Raises ValueError for sizes that no model has."""
    raw = usual(raw)
    for part in (raw, text if isinstance(text := raw.get("text_config"), Mapping) else {}):
        for name, least in _LEAST.items():
            size = part.get(name)
            most = _MOST_LAYERS if name == "num_hidden_layers" else _MOST
            whole = type(size) is int or (isinstance(size, float) and size.is_integer())
            if size is None or (whole and least <= size <= most):
                continue
            raise ValueError(f"{where}: {name} is {str(size)[:40]!r}; it must be a whole number from {least} to {most}")
    return raw


def parse(raw: dict[str, Any], where: str = "config.json") -> Architecture:
    """The architecture in the content of a config.json; `where` names it in errors."""
    families = raw.get("architectures") or []
    family = families[0] if families else None
    if family is None and (named := _BY_MODEL_TYPE.get(str(raw.get("model_type")))):
        raise ValueError(
            f"{where} names no architecture, which engines need, but model_type {raw['model_type']}: add "
            f'"architectures": ["{named}"] if the model generates text'
        )
    if family not in SUPPORTED:
        raise ValueError(
            f"{where}: architecture {family} is not supported; supported: {', '.join(SUPPORTED)}. "
            "On GPUs model.provider=mcore_bridge may know it"
        )
    _refuse(raw, family, where)
    try:
        return Architecture(
            **_sizes(raw),
            family=family,
            ffn_hidden_size=int(raw["intermediate_size"]),
            rope=_rope(raw, where),
            qkv_bias=family in ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM") and bool(raw.get("qkv_bias", True)),
            qk_norm=family in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
            experts=_experts(raw, family),
        )
    except KeyError as error:
        raise ValueError(f"{where}: {error.args[0]} is missing") from None


def counted(raw: dict[str, Any]) -> Architecture:
    """Return the sizes in the content of any config.json, also of a model that is not trained.

    Raises ValueError where a size is missing that every model has.
    """
    try:
        return parse(raw)
    except (ValueError, TypeError, LookupError, AttributeError):
        from gspo_hpc.models import families  # only here: models that are trained do without

    text = families.text_part(raw)
    family = str((raw.get("architectures") or ["an unnamed architecture"])[0])
    try:
        return _decoder(text, family, **families.extras(raw, known=family in SUPPORTED))
    except KeyError as error:
        raise ValueError(f"config.json: {error.args[0]} is missing") from None


def _decoder(text: Mapping[str, Any], family: str, **known: Any) -> Architecture:
    """Return a decoder with the sizes that any family gives, and with what else is `known` of this one."""
    return Architecture(
        **_sizes(text) | {"ffn_hidden_size": int(text.get("intermediate_size") or 0)} | known,
        family=family,
        rope=Rope(float(text.get("rope_theta") or 10000.0)),
        qkv_bias=False,
        qk_norm=False,
    )


def _sizes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return what every family has under the same names. Raises KeyError for one that is missing."""
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    return {
        "num_layers": int(raw["num_hidden_layers"]),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": int(raw.get("num_key_value_heads") or heads),
        "head_dim": int(raw.get("head_dim") or hidden // heads),
        "vocab_size": int(raw["vocab_size"]),
        "max_position_embeddings": int(raw.get("max_position_embeddings") or 2048),
        "norm_eps": float(raw.get("rms_norm_eps") or 1e-6),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
    }


def _experts(raw: dict[str, Any], family: str) -> Experts | None:
    if family == "MixtralForCausalLM":
        return Experts(
            int(raw["num_local_experts"]), int(raw["num_experts_per_tok"]), int(raw["intermediate_size"]), True
        )
    if family not in ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"):
        return None
    shared = int(raw["shared_expert_intermediate_size"]) if family == "Qwen2MoeForCausalLM" else 0
    step, without = int(raw.get("decoder_sparse_step") or 1), set(raw.get("mlp_only_layers") or ())
    return Experts(
        count=int(raw["num_experts" if "num_experts" in raw else "num_local_experts"]),
        top_k=int(raw["num_experts_per_tok"]),
        ffn_hidden_size=int(raw["moe_intermediate_size"]),
        normalize_top_k=bool(raw.get("norm_topk_prob", False)),
        shared_ffn_hidden_size=shared,
        dense_layers=tuple(i for i in range(int(raw["num_hidden_layers"])) if i in without or (i + 1) % step),
    )


def _rope(raw: dict[str, Any], where: str) -> Rope:
    """Return the rotary embeddings in rope_parameters, or in rope_scaling and rope_theta of older files."""
    given = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = float(given.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0)
    kinds = {given.pop(key, None) for key in ("rope_type", "type")} - {None}
    kind = str(kinds.pop()) if kinds else "default"
    partial = given.pop("partial_rotary_factor", 1.0)
    if kind not in _ROPE_KEYS:
        raise ValueError(f"{where}: rope_type {kind} is not supported; supported: {', '.join(_ROPE_KEYS)}")
    given = {key: value for key, value in given.items() if value is not None}
    unknown = sorted(given.keys() - set(_ROPE_KEYS[kind]))
    if unknown or partial != 1.0:
        name = unknown[0] if unknown else "partial_rotary_factor"
        raise ValueError(f"{where}: {name} of the rope parameters is not supported with rope_type {kind}")
    if kind == "default":
        return Rope(theta)
    for key in _ROPE_KEYS[kind] if kind != "yarn" else ():  # yarn's all have a default
        given[key]  # or KeyError, which names it
    length = given.get("original_max_position_embeddings") or raw.get("max_position_embeddings", 2048)
    factor = float(given["factor"] if "factor" in given else raw.get("max_position_embeddings", 2048) / length)
    magnitude = given.get("attention_factor")
    if magnitude is None:
        yarn = kind == "yarn"
        magnitude = _yarn_magnitude(factor, given.get("mscale"), given.get("mscale_all_dim")) if yarn else 1.0
    return Rope(
        theta,
        kind,
        factor,
        original_length=int(length),
        low_frequency_factor=float(given.get("low_freq_factor", 1.0)),
        high_frequency_factor=float(given.get("high_freq_factor", 4.0)),
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        truncate=bool(given.get("truncate", True)),
        magnitude=float(magnitude),
    )


def _yarn_magnitude(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Return the YaRN paper's `magnitude`, for configurations that do not give it."""

    def of(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    return of(mscale) / of(mscale_all_dim) if mscale and mscale_all_dim else of(1.0)


def is_block_fp8(settings: Mapping[str, Any]) -> bool:
    """Return True for the content of a config.json whose weights are FP8 in blocks, as DeepSeek-V3's."""
    quantization = settings.get("quantization_config")
    found = quantization if isinstance(quantization, Mapping) else {}
    return found.get("quant_method") == "fp8" and bool(found.get("weight_block_size"))


def _quantized(raw: Mapping[str, Any], known: str) -> str | None:
    """Return why weights that are quantized cannot be loaded; None for others. `known` says what would be loaded."""
    found = raw.get("quantization_config")
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, Mapping) else found
    return (
        f"its weights are quantized (quantization_config: {str(method)[:40]}), and this loads {known}. "
        "Give the model's folder in 16 bits"
    )


def _refuse(raw: dict[str, Any], family: str, where: str) -> None:
    if reason := _quantized(raw, "16 or 32 bits, with model.provider=mcore_bridge also FP8 in blocks"):
        raise ValueError(f"{where}: {reason}")
    expected: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "use_sliding_window": (False,),
        **(
            {"sliding_window": ()} if family in ("MistralForCausalLM", "MixtralForCausalLM") else {}
        ),  # Qwen's has another switch
        "attention_dropout": (0, 0.0),
        "partial_rotary_factor": (1, 1.0),
        "pretraining_tp": (1,),
        "router_jitter_noise": (0, 0.0),
    }
    for key, allowed in expected.items():
        value = raw.get(key)
        if value is not None and value not in allowed:
            shown = " or ".join(map(str, allowed)) or "absent"
            raise ValueError(f"{where}: {key} = {str(value)[:60]} is not supported; it must be {shown}")
    other = set(raw.get("layer_types") or ()) - {"full_attention"}
    if other:
        raise ValueError(f"{where}: layer_types with {other.pop()} are not supported; it must be full_attention")
