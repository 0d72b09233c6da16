"""The plan and the config refuse for vLLM's sake no more than the installed vLLM refuses, and no less.

vLLM is imported by the tests alone: each worker collects this file, and one of them runs it.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from gspo_hpc.config.engine_arguments import VLLM_ARGUMENTS
from gspo_hpc.config.loader import ConfigError, from_dict
from gspo_hpc.planning import installed
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.planning.rules.engine_arguments import EngineArgumentRule, slip_of
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


def test_any_seed_of_a_run_is_one_of_an_engine() -> None:
    from vllm.utils.torch_utils import set_random_seed

    with pytest.raises(ValueError, match="between 0 and"):
        set_random_seed(2**32)
    config = from_dict({"run": {"seed": 2**63 - 1}, "cluster": {"platform": "cpu"}})
    set_random_seed(engine_settings(config, 1, False).seed)
