"""LoRA in every layout of dense layers: against one rank, against `peft`, with the base as it was, saved and loaded.

A minute and a half beside three busy processes; the cases take 58 s of processor time.

It would catch: a gradient that is not summed over the ranks that share an adapter, or is summed twice; rows of queries,
keys and values, or of gate and up, that got each other's adapter; an adapter that depends on the layout; a recomputed
layer without a gradient; a base weight that moves; a merge that is not what the model computes; a checkpoint that lacks
anything of adapters or optimizer, or continues on another base.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from gspo_hpc.models import architecture
from gspo_hpc.planning.estimates import activations, adapters, parameters
from tests.gloo import cases
from tests.gloo.layouts import ADAPTED, ADAPTED_HELD, ADAPTED_KEPT, ADAPTED_MERGED, ADAPTED_SAVED, Arrays, by_merging
from tests.gloo.reference import assert_takes_what_is_planned

CASES = "adapted-.*"
MANY = [name for name, (world, *_) in ADAPTED.items() if world > 1 and not name.endswith("16")]


def one_of(name: str) -> str:
    """The case of one rank that a case is held against."""
    return "adapted-one" + next((end for end in ("-some", "-single") if name.endswith(end)), "")


@pytest.mark.parametrize("name", MANY)
def test_adapters_in_any_layout_equal_one_rank(name: str, results: dict[str, Arrays]) -> None:
    one, many = results[one_of(name)], results[f"adapted-{name}"]
    assert one.keys() == many.keys()
    for key in one:
        if key.startswith("first/") or key.startswith("base/") or key == "changed":
            assert np.array_equal(one[key], many[key]), key
            continue
        scale = np.linalg.norm(one[key]) if key != "loss" else 1.0
        assert scale > 0.0, f"{key} has nothing to compare"
        assert np.linalg.norm(many[key] - one[key]) <= 1e-5 * scale, key


@pytest.mark.parametrize("name", ADAPTED)
def test_no_bit_of_the_base_changes(name: str, models: dict[str, Path], results: dict[str, Arrays]) -> None:
    _, model, _, _ = ADAPTED[name]
    found, stored = results[f"adapted-{name}"], load_file(models[model] / "model.safetensors")
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(name.split("-")[-1], torch.float32)
    assert not found["changed"].size
    assert {key.removeprefix("base/") for key in found if key.startswith("base/")} == stored.keys()
    for key, tensor in stored.items():
        assert np.array_equal(found[f"base/{key}"], tensor.to(dtype).float().numpy()), key


def test_recomputation_changes_no_bit(results: dict[str, Arrays]) -> None:
    for plain, again in (("one", "one-recomputed"), ("tp2-sp", "tp2-sp-recomputed")):
        one, many = results[f"adapted-{plain}"], results[f"adapted-{again}"]
        assert [name for name in one if not np.array_equal(one[name], many[name])] == []


@pytest.mark.parametrize("name", ["one", "one-some", "one-single"])
def test_merged_weights_are_the_sum(name: str, results: dict[str, Arrays]) -> None:
    """Engines get W + alpha / rank * B A, and W where there is no adapter."""
    found, adapter = results[f"adapted-{name}"], ADAPTED[name][2]["adapter"]
    scale, adapted = adapter["alpha"] / adapter["rank"], 0
    for key, merged in found.items():
        if not key.startswith("merged/"):
            continue
        module = key.removeprefix("merged/").removesuffix(".weight")
        expected = found[f"base/{module}.weight"] if f"base/{module}.weight" in found else found[f"base/{module}"]
        if f"last/{module}.lora_A" in found:
            adapted += 1
            expected = expected + scale * found[f"last/{module}.lora_B"] @ found[f"last/{module}.lora_A"]
            assert not np.array_equal(merged, found[f"base/{module}.weight"])
        np.testing.assert_allclose(merged, expected, rtol=1e-5, atol=1e-6)
    assert adapted == (12 if name == "one-some" else 28)


@pytest.mark.parametrize("name", ["one", "one-some", "one-single"])
def test_logprobs_and_gradients_equal_those_of_peft(
    name: str, models: dict[str, Path], results: dict[str, Arrays]
) -> None:
    """The same matrices in `peft`, on each completion by itself, with the first step's objective written out."""
    found, (_, family, given, _) = results[f"adapted-{name}"], ADAPTED[name]
    model = transformers.AutoModelForCausalLM.from_pretrained(models[family], dtype=torch.float64)
    adapter = given["adapter"]
    targets = adapter.get("targets", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=adapter["rank"], lora_alpha=adapter["alpha"], target_modules=targets)
    )
    first = {f"base_model.model.{key.removeprefix('first/')}.weight": key for key in found if key.startswith("first/")}
    state = {there: torch.from_numpy(found[key]).double() for there, key in first.items()}
    peft.set_peft_model_state_dict(adapted, state)
    loss = torch.zeros((), dtype=torch.float64)
    every = [(group, index, one) for group in cases.groups() for index, one in enumerate(group.completions)]
    for group, index, completion in every:
        tokens = torch.tensor(np.concatenate([group.prompt.tokens, completion.tokens]), dtype=torch.int64)
        logprobs = adapted(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        mine = logprobs[len(group.prompt.tokens) - 1 :][torch.from_numpy(completion.sampled)]
        np.testing.assert_allclose(found[f"logprobs/{group.slot}-{index}"], mine.detach().numpy(), rtol=1e-5, atol=1e-4)
        loss = loss - completion.advantage * (mine - mine.detach()).mean().exp() / len(every)
    loss.backward()
    assert abs(float(loss) - found["loss"][0]) < 1e-5
    gradients = {name: one.grad for name, one in adapted.named_parameters() if one.grad is not None}
    assert len(gradients) == len(first)
    for there, key in first.items():
        theirs = gradients[there.replace(".weight", ".default.weight")]
        ours = found[key.replace("first/", "gradient/")]
        assert theirs is not None and np.linalg.norm(theirs) > 0
        assert np.linalg.norm(ours - theirs.numpy()) <= 1e-5 * np.linalg.norm(theirs), key


@pytest.mark.parametrize("name", ADAPTED_SAVED)
def test_a_checkpoint_of_adapters_goes_on_bit_for_bit(name: str, results: dict[str, Arrays]) -> None:
    before, after = results[f"adapted-saved-{name}"], results[f"adapted-again-{name}"]
    assert after.pop("refused")[0].startswith("model.path")
    assert before.keys() == after.keys()
    assert [key for key in before if not np.array_equal(before[key], after[key])] == []


@pytest.mark.parametrize("name", [name for name in ADAPTED_SAVED if not name.endswith("16")])
def test_a_checkpoint_of_adapters_moves_between_layouts(name: str, results: dict[str, Arrays]) -> None:
    """Adapters and a moving reference bit for bit; the optimizer so that the next steps are those of who saved."""
    for there, here in (
        ("adapted-saved-one", f"adapted-from-one-{name}"),
        (f"adapted-saved-{name}", f"adapted-to-one-{name}"),
    ):
        before, after = results[there], results[here]
        assert before.keys() == after.keys() - {"refused"}
        for key, expected in before.items():
            which, matrix = key.split("/")
            if which != "after":
                assert np.array_equal(after[key], expected), key
                continue
            assert not np.array_equal(before[f"reference/{matrix}"], before[f"saved/{matrix}"])
            moved = np.linalg.norm(expected - before[f"saved/{matrix}"])
            assert np.linalg.norm(after[key] - expected) <= 1e-3 * moved, key


@pytest.mark.parametrize("name", ADAPTED_HELD)
def test_adapters_take_what_the_plan_says(name: str, models: dict[str, Path], results: dict[str, Arrays]) -> None:
    """Gradients, moments and masters are those of adapters alone; the base has one copy, in the model's dtype."""
    world, model, given, sections = ADAPTED_HELD[name]
    arch, settings = architecture.read(models[model]), cases.config(str(models[model]), world, **given, **sections)
    found = results[f"adapted-held-{name}"]
    assert_takes_what_is_planned(found["held"], arch, settings)
    state = parameters.state(arch, settings, 0)
    planned = parameters.of_node(arch, settings, state, 0, 0, 1).get("reference_and_policy", 0)
    assert found["beside"].sum() == planned and (planned > 0) == ("moving" in name)


@pytest.mark.parametrize("name", ADAPTED_KEPT)
@pytest.mark.parametrize("swiglu", ["kept", "fused"])
def test_a_micro_batch_keeps_what_the_estimate_says(
    name: str, swiglu: str, models: dict[str, Path], results: dict[str, Arrays], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less than one of full training: a frozen layer without an adapter keeps no inputs."""
    world, model, given, sections = ADAPTED_KEPT[name]
    arch, settings = architecture.read(models[model]), cases.config(str(models[model]), world, **given, **sections)
    monkeypatch.setattr(activations, "fuses_swiglu", lambda config: swiglu == "fused")
    measured = results[f"adapted-{swiglu}-{name}"]
    (tokens,), pp = measured["tokens"], settings.parallel.pipeline_model_parallel_size
    for stage, total in measured["kept"].tolist():
        held = activations.kept(arch, settings, parameters.layers_of(arch, settings, stage)).held
        ends = arch.hidden_size * (3 if stage == pp - 1 else 0)  # the last norm, and the rows that predict something
        layers = parameters.layers_of(arch, settings, stage)
        copies = 0 if name == "one-full" else adapters.joined(arch, settings, len(layers))
        within = 0.06 if name == "one-full" else 0.02
        assert total == pytest.approx(((held + ends) * tokens + copies) * 4, rel=within), stage


@pytest.mark.parametrize("name", ADAPTED_MERGED)
def test_a_sync_takes_what_the_plan_says_to_merge(
    name: str, models: dict[str, Path], results: dict[str, Arrays]
) -> None:
    """One weight is merged at a time: not those of a bucket, of which this model has several for each."""
    world, model, given, sections = ADAPTED_MERGED[name]
    sections = by_merging(given) | sections
    arch, settings = architecture.read(models[model]), cases.config(str(models[model]), world, **sections)
    peak, buckets = results[f"adapted-merged-{name}"]["taken"].tolist()
    assert peak - buckets == pytest.approx(adapters.merging(arch, settings), rel=0.01)
