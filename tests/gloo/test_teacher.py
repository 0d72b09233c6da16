"""A teacher of another family and size in the place of the reference: against transformers, and in other layouts.

It would catch log-probs of the student in the place of the teacher's, a gradient that is not that of the reverse KL
divergence, a teacher that takes part in training or changes, and one that is cut otherwise than its tensors.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests.gloo import cases
from tests.gloo.layouts import TAUGHT, TAUGHT_BY_EXPERTS, Arrays

CASES = "taught-.*"
BETA = 0.7


def logprobs_of(model: torch.nn.Module, prompt: np.ndarray, response: np.ndarray) -> torch.Tensor:
    """Log-probs of a response in float64, of one sample by itself."""
    tokens = torch.tensor(np.concatenate([prompt, response]), dtype=torch.int64)
    found: torch.Tensor = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return found[len(prompt) - 1 :]


def test_loss_and_gradients_are_those_of_the_reverse_divergence(
    models: dict[str, Path], results: dict[str, Arrays]
) -> None:
    """With ratios of 1 the gradient of a token is beta (log pi - log pi_teacher) times that of log pi, the policy
    gradient of the reverse divergence; its value is k3. Rewards have GSPO's term beside it."""
    found = results["taught-one"]
    student = transformers.AutoModelForCausalLM.from_pretrained(models["llama-tied"], dtype=torch.float64)
    teacher = transformers.AutoModelForCausalLM.from_pretrained(models["qwen3-teacher"], dtype=torch.float64)
    every = [(group, index, one) for group in cases.groups() for index, one in enumerate(group.completions)]
    for kind in ("alone", "mixed"):
        student.zero_grad()
        surrogate, value, divergence = torch.zeros((), dtype=torch.float64), 0.0, []
        for group, index, one in every:
            sampled = torch.from_numpy(one.sampled)
            mine = logprobs_of(student, group.prompt.tokens, one.tokens)[sampled]
            with torch.no_grad():
                its = logprobs_of(teacher, group.prompt.tokens, one.tokens)[sampled]
            np.testing.assert_allclose(found[f"logprobs/{group.slot}-{index}"], its.numpy(), rtol=1e-5, atol=1e-4)
            advantage = one.advantage if kind == "mixed" else 0.0
            moved = its - mine.detach()
            surrogate = surrogate + (BETA * -moved * mine - advantage * mine).mean() / len(every)
            value += float((BETA * (moved.expm1() - moved)).mean() - advantage) / len(every)
            divergence.append((moved.expm1() - moved).numpy())
        surrogate.backward()
        assert abs(found[f"{kind}/loss"] - value) <= 1e-5 * abs(value)
        mean = float(np.concatenate(divergence).mean())
        assert abs(found[f"{kind}/reference_kl"] - mean) <= 1e-5 * mean
        for name, parameter in student.named_parameters():
            assert parameter.grad is not None
            theirs, ours = parameter.grad.numpy(), found[f"{kind}/gradient/{name}"]
            assert np.linalg.norm(theirs) > 0
            assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs), name


@pytest.mark.parametrize(
    "name", [name for name in (*TAUGHT, *TAUGHT_BY_EXPERTS) if not name.endswith("one") and name != "tp2-adapters"]
)
def test_every_layout_learns_the_same(name: str, results: dict[str, Arrays]) -> None:
    """Also with a mixture as teacher, whose experts are spread over ranks, or are not where the trainer's are."""
    alone = f"{name.partition('-')[0]}-one" if name in TAUGHT_BY_EXPERTS else "one"
    one, many = results[f"taught-{alone}"], results[f"taught-{name}"]
    assert one.keys() == many.keys()
    for key in one:
        if key not in ("weights", "own"):
            scale = np.linalg.norm(one[key])
            assert scale > 0 and np.linalg.norm(many[key] - one[key]) <= 1e-5 * scale, key


@pytest.mark.parametrize("name", [*TAUGHT, *TAUGHT_BY_EXPERTS])
def test_the_policy_comes_nearer_and_the_teacher_stays(name: str, results: dict[str, Arrays]) -> None:
    found = results[f"taught-{name}"]
    assert (np.diff(found["divergences"]) < 0).all(), found["divergences"]
    np.testing.assert_allclose(found["divergences"][0], found["alone/reference_kl"], rtol=1e-5)
    whole = results["taught-dense-one" if name in TAUGHT_BY_EXPERTS else "taught-one"]["weights"]
    its = name.rpartition("-its-")[2]  # the teacher's layout is the trainer's, or its own
    share = 0.5 if "tp2" in its or "pp2" in its else 0.6 if "ep2" in its else 1.0  # nearly all weights are experts
    assert abs(found["weights"] / whole - share) < 0.1


def test_experts_of_the_policy_are_where_its_layout_has_them(results: dict[str, Arrays]) -> None:
    """They are spread over two ranks, beside a teacher whose experts each rank has whole."""
    share = results["taught-mixture-ep2-its-dp2"]["own"] / results["taught-mixture-one"]["own"]
    assert 0.5 < share < 0.9
