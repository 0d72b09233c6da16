"""Megatron-Core on gloo ranks against Hugging Face and against itself on one rank."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from gspo_hpc.models import architecture
from gspo_hpc.planning.estimates import activations, parameters
from gspo_hpc.policy import weight_stream
from tests.gloo import cases
from tests.gloo.layouts import (
    DENSE,
    EXPERTS,
    FAMILIES,
    HELD,
    KEPT,
    KEPT_FUSED,
    LAYOUTS,
    LENT,
    MOVES,
    OVERLAPPED,
    PROBED,
    PROBED_BY_TWO,
    PRODUCTS,
    ROPES,
    SAVED,
    SHAPED,
    UNTIED,
    WITH_EXPERTS,
    Arrays,
)
from tests.gloo.reference import assert_equal_steps, assert_takes_what_is_planned, huggingface_logprobs


@pytest.mark.parametrize("family", [*FAMILIES, *ROPES])
def test_logprobs_and_logits_equal_hugging_face(
    family: str, models: dict[str, Path], results: dict[str, Arrays]
) -> None:
    ours = results[f"logprobs-{family}"]
    theirs = {key: one for key, one in huggingface_logprobs(models[family]).items() if not key.startswith("experts/")}
    assert ours.keys() == theirs.keys()
    worst = max(float(np.abs(ours[key] - theirs[key]).max()) for key in ours)
    assert worst < 1e-4, worst


@pytest.mark.parametrize("sharing", ["logprobs-llama-tied", "shared-prefix"])
def test_unshared_prompts_give_the_same_logprobs(results: dict[str, Arrays], sharing: str) -> None:
    for key, shared in results[sharing].items():
        np.testing.assert_allclose(shared, results["unshared"][key], atol=2e-5)


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        *itertools.product(("one", "tp2", "tp4", "pp2", "pp2-vpp2"), DENSE),
        *(("one", family) for family in EXPERTS),
        *WITH_EXPERTS,
    ],
)
def test_weights_stream_back_bit_for_bit(
    layout: str, family: str, models: dict[str, Path], results: dict[str, Arrays]
) -> None:
    assert_streams_back(models[family], results[f"exported-{layout}-{family}"])


@pytest.mark.parametrize("name", SHAPED)
def test_copied_heads_and_uneven_stages_equal_one_rank(
    name: str, models: dict[str, Path], results: dict[str, Arrays]
) -> None:
    """Return cases of a model with one key-value head, and of layers that stages do not divide."""
    model, _, _ = SHAPED[name]
    assert_equal_steps(results[f"steps-one-{model}"], results[f"steps-{name}"])
    assert_streams_back(models[model], results[f"exported-{name}"])


def assert_streams_back(folder: Path, streamed: Arrays) -> None:
    """Every tensor of the folder, and no other, bit for bit."""
    stored = load_file(folder / "model.safetensors")
    assert streamed.keys() == stored.keys()
    for name, tensor in stored.items():
        assert np.array_equal(streamed[name], tensor.numpy()), name


@pytest.mark.parametrize("layout", [*LAYOUTS, *PRODUCTS])
def test_three_steps_equal_one_rank(layout: str, results: dict[str, Arrays]) -> None:
    assert_equal_steps(results["steps-one"], results[f"steps-{layout}"])


@pytest.mark.parametrize("layout", UNTIED)
def test_three_steps_with_a_head_of_its_own_equal_one_rank(layout: str, results: dict[str, Arrays]) -> None:
    assert_equal_steps(results["steps-one-untied"], results[f"steps-{layout}-untied"])


def test_norms_in_two_operations_equal_one_rank(results: dict[str, Arrays]) -> None:
    """Return in fp32 what norms of one operation do, though ranks split the sequences and compute the norms again."""
    assert_equal_steps(results["steps-one-untied"], results["steps-rounded-untied"])


@pytest.mark.parametrize(
    ("plain", "other"),
    [
        ("dp2", "dp2-overlapped"),
        ("dp2-distributed", "dp2-distributed-overlapped"),
        ("one", "attention-recomputed"),
        ("tp2-sp", "tp2-sp-recomputed"),
        (f"etp2-{EXPERTS[-1]}", f"etp2-recomputed-{EXPERTS[-1]}"),
    ],
)
def test_overlapping_and_recomputation_change_no_bit(plain: str, other: str, results: dict[str, Arrays]) -> None:
    one, many = results[f"steps-{plain}"], results[f"steps-{other}"]
    assert one.keys() == many.keys()
    assert [name for name in one if not np.array_equal(one[name], many[name])] == []


@pytest.mark.parametrize("name", OVERLAPPED)
def test_overlapping_changes_no_bit_in_any_layout(name: str, results: dict[str, Arrays]) -> None:
    """Stages, virtual ones, experts and what ranks share of the optimizer: gradients of a step have several passes."""
    one, many = results[f"overlapping-{name}-off"], results[f"overlapping-{name}-on"]
    assert one.keys() == many.keys()
    assert [key for key in one if not np.array_equal(one[key], many[key])] == []


def test_stages_change_no_bit_but_where_they_share_a_weight(results: dict[str, Arrays]) -> None:
    """Of the logits and of the first gradient: both ends have a copy of a tied embedding, whose gradients are added."""
    one, many = results["steps-one"], results["steps-pp2"]
    names = [name for name in one if name.startswith(("logits/", "gradient/"))]
    assert [n for n in names if not np.array_equal(one[n], many[n])] == ["gradient/model.embed_tokens.weight"]


@pytest.mark.parametrize("layout", ["one", *LAYOUTS])
def test_a_pass_that_was_left_has_changed_nothing(layout: str, results: dict[str, Arrays]) -> None:
    """All ranks leave it (the case says so), and what follows is the same bit for bit."""
    left, straight = results[f"stopped-{layout}"], results[f"steps-{layout}"]
    assert left.keys() == straight.keys()
    assert all(np.array_equal(left[name], straight[name]) for name in straight)


@pytest.mark.parametrize("case", ["steps-single", "steps-shared-prefix"])
def test_micro_batches_do_not_change_the_step(results: dict[str, Arrays], case: str) -> None:
    np.testing.assert_allclose(results[case]["grad_norm"], results["steps-one"]["grad_norm"], rtol=1e-4)
    np.testing.assert_allclose(results[case]["loss"], results["steps-one"]["loss"], atol=1e-5)


def test_a_nan_gradient_on_one_rank_is_skipped_on_all(models: dict[str, Path], results: dict[str, Arrays]) -> None:
    assert results["nan"]["skipped"].all()
    for name, tensor in load_file(models["llama-untied"] / "model.safetensors").items():
        assert np.array_equal(results["nan"][name], tensor.numpy()), name


def test_the_learning_rate_follows_the_steps_of_the_run(results: dict[str, Arrays]) -> None:
    """A step that is skipped or empty counts like any other, or a decay would not end with the run (1 s)."""
    np.testing.assert_allclose(results["scheduled"]["rates"], 1e-4 * np.array([1.0, 0.75, 0.5, 0.25]), rtol=1e-9)


def test_a_save_onto_a_full_disk_says_so(results: dict[str, Arrays]) -> None:
    assert "the disk is full or over its quota; free some space" in str(results["full"]["said"][0])


@pytest.mark.parametrize("layout", ["one", "dp2", *SAVED, "ep2-dp2-distributed"])
def test_checkpoint_goes_on_bit_for_bit(layout: str, results: dict[str, Arrays]) -> None:
    arrays = results[f"roundtrip-{layout}"]
    names = [name.removeprefix("straight/") for name in arrays if name.startswith("straight/")]
    assert names
    for name in names:
        assert np.array_equal(arrays[f"straight/{name}"], arrays[f"resumed/{name}"]), name


@pytest.mark.parametrize(("name", "model"), [move[:2] for move in MOVES])
def test_a_checkpoint_moves_between_layouts(name: str, model: str, results: dict[str, Arrays]) -> None:
    """Weights and a moving reference bit for bit; the optimizer so that the next steps are those of who saved."""
    for there, here in (("saved-one", f"from-one-{name}"), (f"saved-{name}", f"to-one-{name}")):
        before, after = results[f"{there}-{model}"], results[f"{here}-{model}"]
        assert before.keys() == after.keys()
        assert any(
            not np.array_equal(before[key], before[key.replace("reference/", "saved/")])
            for key in before
            if key.startswith("reference/")
        )
        for key, expected in before.items():
            if key.startswith(("saved/", "reference/")):
                assert np.array_equal(after[key], expected), key
            else:
                moved = np.linalg.norm(expected - before[key.replace("after/", "saved/")])
                assert np.linalg.norm(after[key] - expected) <= 1e-3 * moved, key


@pytest.mark.parametrize("case", ["bfloat16-1e+00", "bfloat16-gradients", "float16-2e+04"])
def test_sixteen_bits_learn_as_thirty_two(case: str, results: dict[str, Arrays]) -> None:
    """The first gradient, and where three steps go: the masters are fp32, so small steps are not lost."""
    one, half = results["steps-one"], results[f"steps-{case}"]
    assert not half["skipped"].any()
    np.testing.assert_allclose(half["grad_norm"][0], one["grad_norm"][0], rtol=0.1)
    names = [name for name in one if name.startswith("gradient/")]
    ours, theirs = (np.concatenate([results[name].ravel() for name in names]) for results in (half, one))
    scale = np.linalg.norm(ours) * np.linalg.norm(theirs)  # of the gradient as it was scaled
    assert float(ours @ theirs) / scale > 0.98


def test_an_overflow_in_float16_lowers_the_scale_and_is_no_failure(results: dict[str, Arrays]) -> None:
    far = results["steps-float16-1e+18"]
    assert far["skipped"].all() and far["overflowed"].all()
    assert not results["steps-float16-2e+04"]["overflowed"].any()
    assert far["loss_scale"].tolist() == [2.0**60, 2.0**59, 2.0**58]  # Megatron waits for a second one, once


@pytest.mark.parametrize("layout", [*PROBED[2], *PROBED[4], *(f"{name}-by-two" for name in PROBED_BY_TWO)])
def test_an_engine_agrees_with_every_layout(layout: str, results: dict[str, Arrays]) -> None:
    """On log-probs, after a sync; before it the same probe said no (the case says so)."""
    gap_max, gap_mean = results[f"probed-{layout}"]["gap"]
    assert 0 < gap_mean <= gap_max < 1e-3


def test_in_every_layout_an_engine_is_asked_for_all_of_its_experts(results: dict[str, Arrays]) -> None:
    """Their weights have the trainer's sums, whoever has a part of them."""
    layouts = [name for world in (2, 4) for name, (model, _) in PROBED[world].items() if model == EXPERTS[-1]]
    for name in (*layouts, "ep2-by-two"):
        ratios = results[f"probed-{name}"]["experts"]
        assert ratios.shape == (4 * 8, 4) and np.abs(ratios - 1).max() < 1e-3, name  # layers and experts


@pytest.mark.parametrize("model", ["qwen3-untied", EXPERTS[-1]])
def test_the_fingerprint_is_that_of_the_weights_in_every_layout(model: str, results: dict[str, Arrays]) -> None:
    """Whatever ranks cut, and whichever of them hashed a tensor."""
    layouts = [name for world in (2, 4) for name, (probed, _) in PROBED[world].items() if probed == model]
    assert len(layouts) > 5 and len({str(results[f"probed-{name}"]["fingerprint"]) for name in layouts}) == 1


@pytest.mark.parametrize("level", [1, 2])
def test_weights_that_sleep_dropped_are_pushed_again(level: int, results: dict[str, Arrays]) -> None:
    """Once, not again while the engine is awake, and after a sleep at level 2 again though no update has changed them:
    until then the engine computes nothing."""
    found = results[f"slept-{level}"]
    assert found["pushes"].tolist() == [1, 1, level]
    assert bool(found["refused"]) == (level == 2)
    assert found["same"].tolist() == [True] * 4


def test_a_rank_that_waits_for_rank_0_to_hash_a_checkpoint_says_so(results: dict[str, Arrays]) -> None:
    """Else the watcher, which sees it stand still, would take it for hung; rank 0 itself works."""
    found = results["awaited"]
    assert (str(found["found"]), found["rank 0"].tolist()) == ("None", ["None", "None"])


def test_ranks_share_the_files_of_a_checkpoint_that_they_verify(results: dict[str, Arrays]) -> None:
    """Five files of each of two checkpoints: three and two of each, and what any rank finds counts for all."""
    found = results["verified"]
    assert str(found["found"]) == "000001" and found["hashed"].tolist() == [6, 4]
    (warning,) = found["warned"].tolist()
    assert warning.startswith("checkpoint 2 is damaged and not used: shard-1 was changed")


def test_a_rank_that_waits_for_another_is_seen_to_wait(results: dict[str, Arrays]) -> None:
    """Rank 1 sleeps for a second within the phase; half of that is the mean of both ranks' waiting."""
    assert results["metered"]["phases"].tolist() == ["update"]
    seconds, computing, communicating, waiting, peak = results["metered"]["share"]
    assert 0.3 < waiting < 0.5 * seconds
    assert 0.0 < communicating and 0.0 < computing
    assert communicating + computing + waiting <= seconds * (1 + 1e-9)
    assert 50e6 < peak < 10e9
    assert "mfu" not in results["metered"]["metrics"] and "update_tflops" in results["metered"]["metrics"]
    assert {"seconds/computing", "seconds/computing_most", "rank_of_most_seconds", "runtime_memory_gib"} <= {
        *results["metered"]["metrics"].tolist()
    }
    own, mean = results["metered"]["flops"]
    assert 0.5 * own < mean < 1.5 * own  # ranks have about equally much to do


@pytest.mark.parametrize("layout", LENT)
@pytest.mark.parametrize("state", ["lent", "aside", "model", "optimizer"])
def test_lending_the_memory_to_engines_changes_nothing(layout: str, state: str, results: dict[str, Arrays]) -> None:
    """With the optimizer's state on the ranks while they go forward and back, with it in host memory, and with a part
    of the trainer alone that goes there."""
    lent, kept = results[f"{state}-{layout}"], results[f"kept-{layout}"]
    names = [name for name in lent if name not in ("freed", "held")]
    assert names
    assert all(np.array_equal(lent[name], kept[name]) for name in names)
    (held,), freed = lent["held"], lent["freed"]
    gradients = held * (2 if "bfloat16" in layout else 1)
    if state == "optimizer":
        assert freed[-1] >= (0.9 if "distributed" in layout else 2) * gradients  # moments
        return
    assert freed[0] >= held + gradients
    if state in ("aside", "model"):  # it had gone with the step, or never goes
        assert held + gradients <= freed[-1] < held + 1.5 * gradients
    else:
        assert freed[-1] >= freed[0]  # moments come with the first step
        assert freed[-1] >= (held + gradients if "distributed" in layout else held + 3 * gradients)


@pytest.mark.parametrize("name", HELD)
def test_the_model_takes_what_the_plan_says(name: str, models: dict[str, Path], results: dict[str, Arrays]) -> None:
    world, model, sections = HELD[name]
    arch, settings = architecture.read(models[model]), cases.config(str(models[model]), world, **sections)
    assert_takes_what_is_planned(results[f"held-{name}"]["held"], arch, settings)


@pytest.mark.parametrize(("name", "fused"), [*((name, False) for name in KEPT), *((name, True) for name in KEPT_FUSED)])
def test_a_micro_batch_keeps_what_the_estimate_says(
    name: str, fused: bool, models: dict[str, Path], results: dict[str, Arrays], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts are used unevenly: there, what all ranks keep is compared. Of these one half only has a sample."""
    world, model, sections = KEPT[name]
    arch, settings = architecture.read(models[model]), cases.config(str(models[model]), world, **sections)
    if fused:
        monkeypatch.setattr(activations, "fuses_swiglu", lambda config: True)
    measured = results[f"kept-{'fused' if fused else 'activations'}-{name}"]
    (tokens,) = measured["tokens"]
    pp, even = settings.parallel.pipeline_model_parallel_size, settings.parallel.expert_model_parallel_size == 1
    taken, expected = [], []
    for stage, total in measured["kept"].tolist():
        held = activations.kept(arch, settings, parameters.layers_of(arch, settings, stage)).held
        ends = arch.hidden_size * (4 if stage == pp - 1 else 0)  # the last norm, and the rows that predict something
        expected.append((held + ends) * tokens * 4)
        taken.append(total)
    if not even:
        taken, expected = [sum(taken)], [sum(expected) / 2]
    np.testing.assert_allclose(taken, expected, rtol=0.05 if even else activations.IMBALANCE - 1.0)


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_streaming_takes_the_memory_of_buckets_and_not_of_the_model(layout: str, results: dict[str, Arrays]) -> None:
    """A bucket, gloo's own copies of it in its two threads, and a few tensors."""
    (grown,), (total,) = results[f"streamed-{layout}"]["grown"], results[f"streamed-{layout}"]["total"]
    assert total > 150e6
    assert grown < 4 * weight_stream.BUCKET_BYTES["cpu"] + 0.1 * total, grown


def test_a_shared_optimizer_is_saved_and_loaded_in_the_memory_of_buckets(results: dict[str, Arrays]) -> None:
    """Of four ranks, each of which has a quarter of the state, kept from save to save, and what travels: a batch that
    comes, what is put together of it, and the writer's buffers. A load holds the weights that it reads too.
    """
    save, load, owned, whole, transit = results["shared-peaks"]["bytes"].tolist()
    buckets = 2 * transit + (16 << 20)
    assert whole > 8 * buckets, "else the bound says nothing"
    assert owned < 1.2 * whole / 4
    assert save < buckets, save
    assert load < whole / 2 + owned + buckets, load  # two moments of every weight


def test_a_disk_that_is_full_keeps_no_other_rank_waiting(results: dict[str, Arrays]) -> None:
    """The others need this rank's pieces to write their own. All say that, and the next save is whole."""
    failed, then = results["short-of-disk"]["said"].tolist()
    assert "the disk is full" in failed and then == "done"


@pytest.mark.parametrize("case", ["long", "long-recomputed"])
@pytest.mark.parametrize("work", ["logprobs", "update"])
def test_memory_grows_with_the_tokens_and_no_faster(case: str, work: str, results: dict[str, Arrays]) -> None:
    """Of a single sample of 1,024, 2,048 and 4,096 tokens. All logits of the last would be 268 MB."""
    short, middle, far = (float(one) for one in results[case][work])
    assert far < 3.0 * middle + 8e6 and far < 5.0 * short + 8e6, (short, middle, far)  # with the square: 4 and 16 times
    per_token = (far - short) / 3072
    hidden = 64 * 4  # bytes
    limit = {"logprobs": 140, "update": 180 if case == "long-recomputed" else 420}[work]  # of 4 layers
    assert per_token < limit * hidden, per_token / hidden
