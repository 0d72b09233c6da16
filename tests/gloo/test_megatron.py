"""Megatron-Core on gloo ranks against Hugging Face and against itself on one rank."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.gloo import cases, ranks

Arrays = dict[str, np.ndarray]
EXPERTS = ["mixtral-untied", "qwen2moe-tied", "qwen3moe-untied"]
DENSE = ["llama-tied", "llama-untied", "mistral-untied", "qwen2-tied", "qwen3-untied"]
FAMILIES = [*DENSE, *EXPERTS]
ROPES = ["llama-linear", "llama-llama3", "qwen3-yarn"]
TP2, PP2, CP2 = ({f"{kind}_parallel_size": 2} for kind in ("tensor_model", "pipeline_model", "context"))
SP = {"sequence_parallel": True}
VPP2 = {"virtual_pipeline_model_parallel_size": 2}
DISTRIBUTED = {"optimizer": {"distributed": True}}
LAYOUTS = {  # on two ranks
    "dp2": {},
    "tp2": {"parallel": TP2},
    "tp2-sp": {"parallel": TP2 | SP},
    "pp2": {"parallel": PP2},
    "cp2": {"parallel": CP2},
    "dp2-distributed": DISTRIBUTED,
    "pp2-vpp2": {"parallel": PP2 | VPP2},
    "dp2-overlapped": {"parallel": {"overlap_grad_reduce": True}},
    "dp2-distributed-overlapped": {
        "parallel": {"overlap_grad_reduce": True, "overlap_param_gather": True},
        **DISTRIBUTED,
    },
    "tp2-sp-recomputed": {"parallel": TP2 | SP, "memory": {"recompute_granularity": "full"}},
}
PRODUCTS = {  # on four
    "tp2-dp2": {"parallel": TP2},
    "tp2-dp2-distributed": {"parallel": TP2, **DISTRIBUTED},
    "tp2-sp-pp2": {"parallel": TP2 | SP | PP2},
    "tp2-sp-cp2": {"parallel": TP2 | SP | CP2},
    "pp2-cp2": {"parallel": PP2 | CP2},
    "tp2-sp-pp2-vpp2": {"parallel": TP2 | SP | PP2 | VPP2},
    "cp4": {"parallel": {"context_parallel_size": 4}},
}
EP2 = {"expert_model_parallel_size": 2}
EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, and what they share
    "ep2": (2, {"parallel": EP2}),
    "etp2": (2, {"parallel": TP2 | SP}),  # as many as split the rest, where nothing else is said
    "tp2-ep2-etp1": (2, {"parallel": TP2 | SP | EP2 | {"expert_tensor_parallel_size": 1}}),
    "cp2-ep2": (2, {"parallel": CP2 | EP2}),
    "etp2-recomputed": (2, {"parallel": TP2 | SP, "memory": {"recompute_granularity": "full"}}),
    "ep2-distributed": (2, {"parallel": EP2, **DISTRIBUTED}),
    "tp2-ep2-etp2": (4, {"parallel": TP2 | SP | EP2}),
    "pp2-ep2": (4, {"parallel": PP2 | EP2}),
    "ep2-twice": (4, {"parallel": EP2}),
}


HALF = {"model_dtype": "float16", "optimizer": {"initial_loss_scale": 1024.0, "loss_scale_window": 2}}
SAVED: dict[str, dict[str, Any]] = {  # and loaded again by the same layout
    "dp2-distributed": DISTRIBUTED,
    "dp2-bfloat16": {"model_dtype": "bfloat16"},
    "dp2-distributed-bfloat16": {"model_dtype": "bfloat16", **DISTRIBUTED},
    "tp2-float16": {"parallel": TP2, **HALF},
}
MOVES: list[tuple[str, str, int, dict[str, Any]]] = [  # of a checkpoint between one rank and these
    ("dp2-distributed", "llama-tied", 2, LAYOUTS["dp2-distributed"]),
    ("pp2-vpp2", "llama-tied", 2, LAYOUTS["pp2-vpp2"]),
    ("tp2-dp2-distributed", "llama-tied", 4, PRODUCTS["tp2-dp2-distributed"]),
    ("tp2-sp-pp2-vpp2", "qwen3-untied", 4, PRODUCTS["tp2-sp-pp2-vpp2"]),
    ("tp2-sp-cp2", "llama-tied", 4, PRODUCTS["tp2-sp-cp2"]),
    *((name, EXPERTS[-1], *EXPERT_LAYOUTS[name]) for name in ("ep2-distributed", "etp2", "tp2-ep2-etp2", "pp2-ep2")),
]


PROBED: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {  # an engine of each model, shared by its layouts
    2: {name: ("qwen3-untied", LAYOUTS[name]) for name in LAYOUTS}
    | {name: (EXPERTS[-1], sections) for name, (world, sections) in EXPERT_LAYOUTS.items() if world == 2},
    4: {name: ("qwen3-untied", PRODUCTS[name]) for name in PRODUCTS}
    | {name: (EXPERTS[-1], sections) for name, (world, sections) in EXPERT_LAYOUTS.items() if world == 4},
}


@pytest.fixture(scope="module")
def results(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Arrays]:
    """Every case below, on one and on two ranks: two starts of processes in all."""
    folder = tmp_path_factory.mktemp("gloo")
    tied = str(models["llama-tied"])
    one: dict[str, ranks.Case] = {f"logprobs-{f}": ("logprobs", {"model": str(models[f])}) for f in [*FAMILIES, *ROPES]}
    one |= {f"exported-one-{f}": ("exported", {"model": str(models[f])}) for f in FAMILIES}
    one["unshared"] = ("logprobs", {"model": tied, "batch": {"share_prompts": False}})
    one["opening"] = ("logprobs", {"model": tied, "batch": {"micro_batch_tokens": 400}})  # all in one micro-batch
    one["steps-one"] = ("steps", {"model": tied})
    single = {"micro_batch_tokens": None, "micro_batch_size": 1}
    one["steps-single"] = ("steps", {"model": tied, "batch": single})
    one["steps-opening"] = ("steps", {"model": tied, "batch": {"micro_batch_tokens": 400}})
    two: dict[str, ranks.Case] = {
        f"steps-{name}": ("steps", {"model": tied, **sections}) for name, sections in LAYOUTS.items()
    }
    (folder / "full").mkdir()
    attention_again = {"memory": {"recompute_granularity": "selective"}}
    one["steps-attention-recomputed"] = ("steps", {"model": tied, **attention_again})
    one["full"] = ("full", {"model": tied, "folder": str(folder / "full")})
    one["stopped-one"] = ("steps", {"model": tied, "stop_rank": 0})
    two |= {f"stopped-{name}": ("steps", {"model": tied, "stop_rank": 1, **LAYOUTS[name]}) for name in LAYOUTS}
    for name in ("tp2", "pp2", "pp2-vpp2"):
        two |= {f"exported-{name}-{f}": ("exported", {"model": str(models[f]), **LAYOUTS[name]}) for f in DENSE}
    two["nan"] = ("steps", {"model": str(models["llama-untied"]), "count": 1, "nan_rank": 1})
    for dtype, scale in (("bfloat16", 1.0), ("float16", 2.0**14), ("float16", 2.0**60)):
        sections = {"model_dtype": dtype, "optimizer": {"initial_loss_scale": scale}}
        one[f"steps-{dtype}-{scale:.0e}"] = ("steps", {"model": tied, **sections})
    one["steps-bfloat16-gradients"] = (
        "steps",
        {"model": tied, "model_dtype": "bfloat16", "optimizer": {"grad_reduce_in_fp32": False}},
    )
    for name, work in (("one", one), ("dp2", two), *((name, two) for name in SAVED)):
        (folder / name).mkdir()
        sections = LAYOUTS.get(name, {}) | SAVED.get(name, {})
        work[f"roundtrip-{name}"] = ("roundtrip", {"model": tied, "folder": str(folder / name), **sections})
    four: dict[str, ranks.Case] = {f"steps-{n}": ("steps", {"model": tied, **s}) for n, s in PRODUCTS.items()}
    back: dict[str, ranks.Case] = {}
    untied = str(models["qwen3-untied"])
    one["steps-one-untied"] = ("steps", {"model": untied})
    four["steps-tp2-sp-cp2-untied"] = ("steps", {"model": untied, **PRODUCTS["tp2-sp-cp2"]})
    one |= {f"steps-one-{f}": ("steps", {"model": str(models[f])}) for f in EXPERTS}
    for name, (world, sections) in EXPERT_LAYOUTS.items():
        work = {2: two, 4: four}[world]
        for family in EXPERTS if name in ("ep2", "tp2-ep2-etp2") else EXPERTS[-1:]:
            model = str(models[family])
            work[f"steps-{name}-{family}"] = ("steps", {"model": model, **sections})
            work[f"exported-{name}-{family}"] = ("exported", {"model": model, **sections})
    for world, work in ((2, two), (4, four)):
        for name, (model, sections) in PROBED[world].items():
            work[f"probed-{name}"] = ("probed", {"model": str(models[model]), **sections})
    for name, model, world, sections in MOVES:
        folder_of = {"model": str(models[model]), "folder": str(folder / f"saved-{name}-{model}")}
        from_one = {**folder_of, "folder": str(folder / f"saved-one-{model}")}
        one[f"saved-one-{model}"] = ("saved", from_one)
        work = {2: two, 4: four}[world]
        work[f"from-one-{name}-{model}"] = ("loaded", {**from_one, **sections})
        work[f"saved-{name}-{model}"] = ("saved", {**folder_of, **sections})
        back[f"to-one-{name}-{model}"] = ("loaded", folder_of)
    return (
        ranks.run(1, folder, one) | ranks.run(2, folder, two) | ranks.run(4, folder, four) | ranks.run(1, folder, back)
    )


def huggingface_logprobs(folder: Path) -> Arrays:
    """Each completion on its own, unpacked, through transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    result = {}
    for group in cases.groups():
        for index, completion in enumerate(group.completions):
            tokens = torch.tensor(np.concatenate([group.prompt.tokens, completion.tokens]), dtype=torch.int64)
            with torch.no_grad():
                logits = model(tokens[None]).logits[0]
            logprobs = torch.log_softmax(logits[:-1].float(), -1).gather(1, tokens[1:, None])[:, 0]
            result[f"{group.slot}-{index}"] = logprobs[len(group.prompt.tokens) - 1 :].numpy()
    return result


@pytest.mark.parametrize("family", [*FAMILIES, *ROPES])
def test_logprobs_equal_hugging_face(family: str, models: dict[str, Path], results: dict[str, Arrays]) -> None:
    ours, theirs = results[f"logprobs-{family}"], huggingface_logprobs(models[family])
    assert ours.keys() == theirs.keys()
    worst = max(float(np.abs(ours[key] - theirs[key]).max()) for key in ours)
    assert worst < 1e-4, worst


@pytest.mark.parametrize("sharing", ["logprobs-llama-tied", "opening"])
def test_unshared_prompts_give_the_same_logprobs(results: dict[str, Arrays], sharing: str) -> None:
    for key, shared in results[sharing].items():
        np.testing.assert_allclose(shared, results["unshared"][key], atol=2e-5)


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        *itertools.product(("one", "tp2", "pp2", "pp2-vpp2"), DENSE),
        *itertools.product(("one", "ep2", "tp2-ep2-etp2"), EXPERTS),
    ]
    + [(name, EXPERTS[-1]) for name in EXPERT_LAYOUTS if name not in ("ep2", "tp2-ep2-etp2")],
)
def test_weights_stream_back_bit_for_bit(
    layout: str, family: str, models: dict[str, Path], results: dict[str, Arrays]
) -> None:
    stored = load_file(models[family] / "model.safetensors")
    streamed = results[f"exported-{layout}-{family}"]
    assert streamed.keys() == stored.keys()
    for name, tensor in stored.items():
        assert np.array_equal(streamed[name], tensor.numpy()), name


def assert_equal_steps(one: Arrays, many: Arrays, *, with_gradients: bool) -> None:
    """Losses, entropies, gradient norms, every weight, and every gradient of the first step: norm of the difference
    over norm of the value."""
    assert one["grad_norm"].min() > 1e-3  # there was something to compare
    assert any(name.startswith("gradient/") for name in many) == with_gradients
    assert {name for name in one if not name.startswith("gradient/")} <= many.keys() <= one.keys()
    for name in many:
        expected = one[name]
        if name in ("skipped", "overflowed"):
            assert not expected.any() and not many[name].any()
            continue
        scale = np.linalg.norm(expected) if name != "loss" else 1.0  # of the losses each sums up to nearly nothing
        assert np.linalg.norm(many[name] - expected) <= 1e-5 * scale, name


@pytest.mark.parametrize("layout", [*LAYOUTS, *PRODUCTS, "tp2-sp-cp2-untied", "attention-recomputed"])
def test_three_steps_equal_one_rank(layout: str, results: dict[str, Arrays]) -> None:
    one = results["steps-one-untied" if "untied" in layout else "steps-one"]
    assert_equal_steps(one, results[f"steps-{layout}"], with_gradients="distributed" not in layout)


@pytest.mark.parametrize(
    ("layout", "family"),
    [*itertools.product(("ep2", "tp2-ep2-etp2"), EXPERTS)]
    + [(name, EXPERTS[-1]) for name in EXPERT_LAYOUTS if name not in ("ep2", "tp2-ep2-etp2")],
)
def test_three_steps_with_experts_equal_one_rank(layout: str, family: str, results: dict[str, Arrays]) -> None:
    one, many = results[f"steps-one-{family}"], results[f"steps-{layout}-{family}"]
    assert_equal_steps(one, many, with_gradients="distributed" not in layout)


@pytest.mark.parametrize("layout", ["one", *LAYOUTS])
def test_a_pass_that_was_left_has_changed_nothing(layout: str, results: dict[str, Arrays]) -> None:
    """All ranks leave it (the case says so), and what follows is the same bit for bit."""
    left, straight = results[f"stopped-{layout}"], results[f"steps-{layout}"]
    assert left.keys() == straight.keys()
    assert all(np.array_equal(left[name], straight[name]) for name in straight)


@pytest.mark.parametrize("case", ["steps-single", "steps-opening"])
def test_micro_batches_do_not_change_the_step(results: dict[str, Arrays], case: str) -> None:
    np.testing.assert_allclose(results[case]["grad_norm"], results["steps-one"]["grad_norm"], rtol=1e-4)
    np.testing.assert_allclose(results[case]["loss"], results["steps-one"]["loss"], atol=1e-5)


def test_a_nan_gradient_on_one_rank_is_skipped_on_all(models: dict[str, Path], results: dict[str, Arrays]) -> None:
    assert results["nan"]["skipped"].all()
    for name, tensor in load_file(models["llama-untied"] / "model.safetensors").items():
        assert np.array_equal(results["nan"][name], tensor.numpy()), name


def test_a_save_onto_a_full_disk_says_so(results: dict[str, Arrays]) -> None:
    assert "the disk is full or over its quota; free some space" in str(results["full"]["said"][0])


@pytest.mark.parametrize("layout", ["one", "dp2", *SAVED])
def test_checkpoint_goes_on_bit_for_bit(layout: str, results: dict[str, Arrays]) -> None:
    arrays = results[f"roundtrip-{layout}"]
    names = [name.removeprefix("straight/") for name in arrays if name.startswith("straight/")]
    assert names
    for name in names:
        assert np.array_equal(arrays[f"straight/{name}"], arrays[f"resumed/{name}"]), name


@pytest.mark.parametrize(("name", "model"), [move[:2] for move in MOVES])
def test_a_checkpoint_moves_between_layouts(name: str, model: str, results: dict[str, Arrays]) -> None:
    """The weights bit for bit; the optimizer so that the steps after it are those of the layout that saved."""
    for there, here in (("saved-one", f"from-one-{name}"), (f"saved-{name}", f"to-one-{name}")):
        before, after = results[f"{there}-{model}"], results[f"{here}-{model}"]
        assert before.keys() == after.keys()
        for key, expected in before.items():
            if key.startswith("saved/"):
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


@pytest.mark.parametrize("layout", [*PROBED[2], *PROBED[4]])
def test_an_engine_agrees_with_every_layout(layout: str, results: dict[str, Arrays]) -> None:
    """On log-probs, after a sync; before it the same probe said no (the case says so)."""
    gap_max, gap_mean = results[f"probed-{layout}"]["gap"]
    assert 0 < gap_mean <= gap_max < 1e-3
