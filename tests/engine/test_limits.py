"""The plan and the config refuse for vLLM's sake no more than the installed vLLM refuses, and no less.

vLLM is imported by the tests alone: each worker collects this file, and one of them runs it.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest

from gspo_hpc.config.engine_arguments import VLLM_ARGUMENTS
from gspo_hpc.config.loader import ConfigError, from_dict
from gspo_hpc.models import positions
from gspo_hpc.planning import installed
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.planning.rules.engine_arguments import EngineArgumentRule, slip_of
from gspo_hpc.planning.rules.model import ModelRule
from gspo_hpc.training.bringup import engine_settings


def is_taken(name: str, value: Any) -> bool:
    """By vLLM, as it stands: below some temperature it takes another one."""
    from vllm.sampling_params import SamplingParams

    try:
        made = SamplingParams(**{name: value})
    except Exception as error:  # of vLLM's own class, which in 0.32 is no ValueError
        assert name in str(error)
        return False
    return bool(getattr(made, name) == value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (0.001, 0.0099, 0.01, 1.0, 2.0, 2.0001, 5.0)),
        ("top_p", (0.0, 0.001, 1.0, 1.001)),
        ("top_k", (-2, -1, 1, 50)),
    ],
)
def test_sampling_is_refused_where_vllm_refuses(name: str, values: tuple[float, ...]) -> None:
    answers = []
    for value in values:
        try:
            from_dict({"rollout": {name: value}})
            answers.append(True)
        except ConfigError:
            answers.append(False)
    assert answers == [is_taken(name, value) for value in values]
    assert True in answers and False in answers


@pytest.mark.parametrize("tokens", [255, 256])
@pytest.mark.parametrize("sequences", [256, 257])
@pytest.mark.parametrize("chunked", [True, False])
def test_batches_of_an_engine_are_refused_where_vllm_refuses(tokens: int, sequences: int, chunked: bool) -> None:
    from vllm.config.scheduler import SchedulerConfig

    engine = {"max_num_batched_tokens": tokens, "max_num_seqs": sequences, "enable_chunked_prefill": chunked}
    plan = make_plan(from_dict({"rollout": {"max_prompt_length": 128, "max_response_length": 128, "engine": engine}}))
    try:
        SchedulerConfig(max_model_len=256, is_encoder_decoder=False, **engine)
        assert plan.valid
    except ValueError:
        assert plan.broken and {item.rule for item in plan.broken} <= set(EngineArgumentRule)


def test_no_argument_of_vllm_is_taken_for_the_slip_of_another() -> None:
    """The list of arguments is that of version 0.32; in another version those that it lacks are no slips either."""
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    own = {field.name for field in dataclasses.fields(EngineArgs)} - {"_api_process_count", "_api_process_rank"}
    assert [name for name in sorted(own) if slip_of(name)] == []
    here = installed.vllm()
    assert (
        here is not None
        and {*here[1]} >= own
        and {*here[1]}
        <= own
        | {
            *inspect.signature(vllm.LLM).parameters,
            "_api_process_count",
            "_api_process_rank",
        }
    )
    if vllm.__version__.startswith("0.32"):
        assert own <= VLLM_ARGUMENTS <= own | {*inspect.signature(vllm.LLM).parameters}


HEADS = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}
LLAMA = {
    **HEADS,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "num_key_value_heads": 2,
}
OF_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
ORIGINAL = {"original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"max_position_embeddings": 512, "seq_length": 256},
        {"max_position_embeddings": "left out"},
        {"max_position_embeddings": "left out", "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"max_position_embeddings": "left out", "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.5}},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, **OF_LLAMA3}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"max_position_embeddings": 1024, "rope_scaling": {"type": "yarn", "factor": 4.0, **ORIGINAL}},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, **ORIGINAL}},
    ],
    ids=lambda more: "-".join(map(str, more.values())) or "none",
)
def test_the_longest_sequence_is_that_of_vllm(more: dict[str, Any], tmp_path: Path) -> None:
    """Every kind of rotary embeddings that vLLM computes for a Llama has a bound: both refuse one token more."""
    from vllm.config import ModelConfig

    content = LLAMA | {"max_position_embeddings": 512} | more
    content = {key: value for key, value in content.items() if value != "left out"}
    (tmp_path / "config.json").write_text(json.dumps(content))
    scales = installed.yarn_scales()
    assert scales is not None
    found = positions.longest(content, yarn_scales=scales)
    assert found is not None
    for length in (found.length, found.length + 1):
        lengths = {"max_prompt_length": 64, "max_response_length": length - 64}
        config = from_dict({"model": {"path": str(tmp_path)}, "rollout": lengths})
        broken = {item.rule for item in make_plan(config).broken}
        try:
            ModelConfig(model=str(tmp_path), max_model_len=length, skip_tokenizer_init=True)
            assert broken == set()
        except ValueError as error:
            assert "greater than the derived max_model_len" in str(error)
            assert broken == {ModelRule.LONGEST_SEQUENCE_FITS_POSITIONS}
        assert (broken == set()) == (length == found.length)


def test_listed_values_of_arguments_are_those_of_vllm() -> None:
    """The source says what Python finds in the types; each name that is left out would be refused."""
    import vllm.config.quantization
    from vllm.config.cache import CacheDType
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.model_executor.model_loader import LoadFormats

    hints = get_type_hints(EngineArgs, localns=vars(vllm.config.quantization))
    listed = 0
    for field in dataclasses.fields(EngineArgs):
        here = installed.values(field.name)
        assert here is not None and here.take(None)
        default = field.default.name if isinstance(field.default, enum.Enum) else field.default
        assert isinstance(default, dataclasses._MISSING_TYPE) or here.take(default), f"{field.name}={default}"
        names = {one for part in (hints[field.name], *get_args(hints[field.name])) for one in _literals(part)}
        if names and not here.more:
            assert {*here.listed} == names, field.name
            listed += 1
    assert listed > 20
    for name, known in (
        ("kv_cache_dtype", get_args(CacheDType)),
        ("quantization", QUANTIZATION_METHODS),
        ("load_format", get_args(LoadFormats)),
    ):
        found = installed.values(name)
        assert found is not None and {*found.listed} == {*known}


def test_bounds_of_numbers_and_names_of_backends_are_those_of_vllm() -> None:
    """Each bound that the source is said to have is held against vLLM's own classes: that number, and the next one."""
    from pydantic import TypeAdapter, ValidationError
    from vllm import config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backends = installed.values("attention_backend")
    assert backends is not None and {*backends.listed} == {"auto", *AttentionBackendEnum.__members__}
    assert backends.take("flash_attn") and not backends.take("FOO")
    with pytest.raises(ValueError, match="Unknown attention backend"):
        config.AttentionConfig(backend="FOO")  # type: ignore[arg-type]
    bounded = 0
    classes = [one for one in vars(config).values() if dataclasses.is_dataclass(one)]
    for field in dataclasses.fields(EngineArgs):
        here = installed.values(field.name)
        for name, bound in here.bounds if here is not None else ():
            allowed = name in ("ge", "le")
            found = [
                one.metadata
                for part in classes
                for key, one in getattr(part, "__pydantic_fields__", {}).items()
                if key == field.name and any(hasattr(each, name) for each in one.metadata)
            ]
            assert found, field.name
            adapter = TypeAdapter(Annotated[float, *found[0]])
            outside = math.nextafter(bound, -math.inf if name in ("gt", "ge") else math.inf)
            for value, taken in ((bound, allowed), (outside, False)):
                if taken:
                    adapter.validate_python(value)
                    continue
                with pytest.raises(ValidationError):
                    adapter.validate_python(value)
            bounded += 1
    assert bounded > 20


def _literals(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) is Literal else ()


def test_any_seed_of_a_run_is_one_of_an_engine() -> None:
    from vllm.utils.torch_utils import set_random_seed

    with pytest.raises(ValueError, match="between 0 and"):
        set_random_seed(2**32)
    config = from_dict({"run": {"seed": 2**63 - 1}, "cluster": {"platform": "cpu"}})
    set_random_seed(engine_settings(config, 1, False).seed)
