"""Layouts that are suggested can be had, and what is kept is kept."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gspo_hpc.cli import main
from gspo_hpc.config.loader import from_dict, load
from gspo_hpc.config.schema import Config, replace
from gspo_hpc.config.section import written
from gspo_hpc.planning import layouts
from gspo_hpc.planning.estimates.phases import exceeds, percent
from gspo_hpc.planning.fixes import search as fixes_of
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.planning.settings import value_of, with_value
from gspo_hpc.planning.suggest import cuts

CONFIGS = Path(__file__).parents[3] / "configs"
PRESETS = sorted(path for path in CONFIGS.glob("*.yaml") if "gpu:" in path.read_text())


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_every_suggestion_is_a_valid_plan_with_room(preset: Path) -> None:
    config = load(preset)
    found = layouts.find(config)
    assert found
    for layout in found:
        changed = load(preset, str(layout).split())
        plan = make_plan(changed)
        assert plan.valid and plan.memory is not None, plan.broken
        assert plan.memory.headroom == pytest.approx(layout.headroom) and layout.reasons
        assert changed.parallel.tensor_model_parallel_size <= changed.cluster.gpus_per_node
        assert changed.rollout.max_response_length == config.rollout.max_response_length
        given, tokens = config.batch.micro_batch_tokens, changed.batch.micro_batch_tokens
        assert replace(changed.batch, micro_batch_tokens=given) == config.batch and tokens and given and tokens <= given
        assert (tokens < given) == ("batch.micro_batch_tokens" in layout.settings)
    assert found[0].seconds <= min(layout.seconds for layout in found) * layouts.ALIKE**3 * (1 + layouts.RISK)


def test_preference_decides_between_times_that_are_alike_and_only_there() -> None:
    """The constant that calls times alike: without it nobody would be preferred (9 s)."""
    slower = []
    for preset, nodes in (("qwen2.5_7b_tp2", 2), ("qwen3_8b_tp2_cp4_32k", 4)):
        found = layouts.find(load(CONFIGS / f"{preset}.yaml", [f"cluster.nodes={nodes}"]), limit=1000)
        slower.append(found[0].seconds / min(layout.seconds for layout in found))
    assert 1.0 < max(slower) < 1.02


@pytest.mark.parametrize(
    ("preset", "more"),
    [
        (
            "qwen3_8b_tp2_cp4_32k",
            "cluster.nodes=2 parallel.context_parallel_size=1 parallel.pipeline_model_parallel_size=2 "
            "parallel.virtual_pipeline_model_parallel_size=2 rollout.max_response_length=2048",
        ),
        ("qwen2.5_7b_tp2_pp2", "parallel.virtual_pipeline_model_parallel_size=2 memory.recompute_num_layers=7"),
        ("qwen2.5_7b_tp2_pp2", "memory.recompute_granularity=full memory.recompute_num_layers=14"),
        ("qwen3_30b_a3b_tp2_ep4_etp2", "memory.offload_optimizer=true memory.recompute_granularity=selective"),
        ("qwen3_30b_a3b_ep8", "parallel.tensor_model_parallel_size=2 parallel.expert_tensor_parallel_size=1"),
    ],
)
def test_a_suggestion_can_be_pasted_behind_its_config(preset: str, more: str) -> None:
    path, given = CONFIGS / f"{preset}.yaml", more.split()
    found = layouts.find(load(path, given), limit=100)
    assert found
    for layout in found:
        plan = make_plan(load(path, [*given, *str(layout).split()]))
        assert plan.valid and plan.memory is not None, (str(layout), plan.broken)
        assert plan.memory.headroom == pytest.approx(layout.headroom)


@pytest.mark.parametrize(("dtype", "engines"), [("float32", {2, 4}), ("bfloat16", {1, 2})])
def test_engines_of_weights_in_32_bits_are_as_large_as_these(dtype: str, engines: set[int]) -> None:
    """The two smallest that leave room for a cache are tried: with few completions the larger one is faster."""
    raw = {
        "model": {"path": "Qwen/Qwen3-14B", "dtype": dtype},
        "cluster": {"gpus_per_node": 4, "gpu": "H100"},
        "batch": {"global_batch_size": 32, "num_generations": 8, "micro_batch_tokens": 3072},
        "rollout": {"max_prompt_length": 1024, "max_response_length": 2048},
    }
    found = [layout.settings["rollout.tensor_parallel_size"] for layout in layouts.find(from_dict(raw), limit=100)]
    assert {*found} == engines and found[0] == max(engines)


def test_an_engine_beside_a_trainer_that_stays_gets_what_is_left_of_the_card() -> None:
    """With vLLM's own share nothing fitted, and more nodes, other GPUs or another model were named.

    The share is the largest with which a sync fits, too, which brings more than generation has.
    """
    raw = {
        "model": {"path": "Qwen/Qwen3-8B"},
        "cluster": {"gpus_per_node": 8, "gpu": "H100"},
        "memory": {"offload_trainer": False},
        "batch": {"global_batch_size": 64, "num_generations": 8, "micro_batch_tokens": 5120},
        "rollout": {"max_prompt_length": 1024, "max_response_length": 4096},
    }
    share, keep = "rollout.engine.gpu_memory_utilization", frozenset({"memory.offload_trainer"})
    config = from_dict(raw)

    def ways(given: float | None, keep: frozenset[str]) -> list[Config]:
        """Return every layout that fits, of every cut, without the share of its engines."""
        search = layouts.Search(with_value(config, share, given), keep)
        fitting = (one for wanted in search.allowed() for one, _ in search.fitting(wanted))
        return [with_value(one, share, None) for one in fitting]

    every = ways(None, keep)
    small = ways(0.3, keep | {share})
    assert small and all(one in every for one in small)
    assert ways(0.1, keep) == ways(0.55, keep) == every
    for layout in layouts.find(config, keep, limit=8):
        changed = config
        for key, value in layout.settings.items():
            changed = with_value(changed, key, value)
        assert make_plan(changed).valid and not changed.memory.offload_trainer
        larger = round(layout.settings[share] + 0.01, 2)
        assert not make_plan(with_value(changed, share, larger)).valid


def test_gpus_that_are_set_apart_do_not_train() -> None:
    """6 of 8: three pipeline stages are a way to cut 36 layers."""
    server = ["rollout.mode=server", "rollout.engines_per_node=2", "rollout.tensor_parallel_size=1"]
    given = [*server, "model.path=Qwen3-8B", "cluster.nodes=1", "cluster.gpu=B200", "batch.global_batch_size=96"]
    path = CONFIGS / "qwen2.5_32b_tp4_pp4.yaml"
    found = layouts.find(load(path, given), frozenset({"rollout.tensor_parallel_size"}), limit=100)
    assert {layout.settings["parallel.pipeline_model_parallel_size"] for layout in found} >= {1, 3}
    for layout in found:
        plan = make_plan(load(path, [*given, *str(layout).split()]))
        assert plan.valid and plan.quantities["world_size"] == 6


def test_what_is_kept_stays() -> None:
    preset = CONFIGS / "qwen2.5_7b_tp2_pp2.yaml"
    keep = frozenset({"parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"})
    for layout in layouts.find(load(preset), keep):
        assert layout.settings["parallel.tensor_model_parallel_size"] == 2
        assert layout.settings["parallel.pipeline_model_parallel_size"] == 2
    everything = layouts.find(load(preset), limit=100)
    assert len({layout.settings["parallel.tensor_model_parallel_size"] for layout in everything}) > 1


def test_what_cannot_be_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    preset = str(CONFIGS / "llama3.1_70b_tp8_pp8.yaml")
    small = ["cluster.nodes=1", "cluster.gpu=A100-40GB"]
    assert main.main(["suggest", preset, *small]) == 2
    assert "no layout of 8 A100-40GB holds this model" in capsys.readouterr().out
    assert main.main(["suggest", preset, "--keep", "parallel.tensor_parallel"]) == 2
    assert "no such setting; nearest: parallel.tensor_model_parallel_size" in capsys.readouterr().err
    assert main.main(["suggest", preset, "cluster.gpu=null"]) == 2
    assert "cluster.gpu says which GPUs there are: give one of" in capsys.readouterr().err
    assert main.main(["suggest", preset, "cluster.platform=cpu"]) == 2
    assert "cluster.platform is cpu, and layouts are chosen for GPUs" in capsys.readouterr().err


def test_a_model_that_is_not_known_gets_help(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ways to make its sizes known, as far as that can be told from a name, a folder or a file."""
    (odd := tmp_path / "odd").mkdir()
    (broken := tmp_path / "broken").mkdir()
    (odd / "config.json").write_text('{"model_type": "mamba"}')
    (broken / "config.json").write_text("[")
    for path, told in (
        ("no/such-model", "give a local folder with the model's config.json\n"),
        ("Qwen/Qwen3-9B", "config.json; nearest model whose config comes with gspo_hpc: Qwen3"),
        (str(odd), "can be suggested: config.json: num_hidden_layers is missing\n"),
        (str(broken), f"{broken / 'config.json'} is not a readable JSON object\n"),
    ):
        assert main.main(["suggest", str(CONFIGS / "qwen2.5_7b_tp2.yaml"), f"model.path={path}"]) == 2
        error = capsys.readouterr().err
        assert "the sizes of the model are not known, so no layout can be suggested" in error and told in error, error


def test_the_page_and_the_json_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    preset = str(CONFIGS / "qwen2.5_7b_tp2.yaml")
    assert main.main(["suggest", preset, "--limit", "2"]) == 0
    page = capsys.readouterr().out
    assert main.main(["suggest", preset, "--limit", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    seconds = [round(layout["seconds"], 1) for layout in told]
    assert [float(value) for value in re.findall(r"^\d\. ([\d.]+) s a step", page, re.M)] == seconds
    table = [re.split(r"  +", line.strip()) for line in page.splitlines() if re.match(r"  \S.*  \S", line)]
    rows = {name: cells for name, *cells in table}
    assert list(map(float, rows["seconds of a step"][-2:])) == seconds
    config = load(preset)
    for place, layout in enumerate(told):
        for key, value in layout["settings"].items():
            name, own = key.removeprefix("parallel."), value_of(config, key)
            shown = rows[name][-2:][place] if name in rows else written(own)  # rows are of what differs
            assert shown == f"{written(value)}{'*' * (value != own)}", key
    assert rows["memory left of a GPU"][-3] == percent(make_plan(config).memory.headroom)  # type: ignore[union-attr]


def test_the_best_layout_is_written_as_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has what the config gives, on the command line too, and the layout: nothing else, and nothing is lost."""
    out, preset = tmp_path / "new.yaml", str(CONFIGS / "qwen3_30b_a3b_ep8.yaml")
    given = ["run.max_steps=7", "reward.functions=[{function: length, args: {target: 3, limit: 9}, weight: 0.5}]"]
    assert main.main(["suggest", preset, *given, "--out", str(out), "--json"]) == 0
    best = json.loads(capsys.readouterr().out)[0]["settings"]
    wanted = load(preset, given)
    for key, value in best.items():
        wanted = with_value(wanted, key, value)
    assert load(out) == wanted
    assert "max_steps: 7" in out.read_text() and "retries" not in out.read_text()
    assert main.main(["suggest", preset, "--out", str(out)]) == 2
    assert f"--out {out} is there already; name another file" in capsys.readouterr().err


def test_completions_go_through_one_pipeline_or_several(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["suggest", str(CONFIGS / "qwen2.5_7b_tp2.yaml"), "cluster.nodes=2", "--limit", "9"]) == 0
    page = capsys.readouterr().out
    assert "128 completions of an update go through one pipeline\n" in page
    assert "64 completions of an update go through each of 2 pipelines\n" in page


def test_what_a_doubling_of_each_size_counts() -> None:
    """As docs/plan.md tells: tensor parallelism least, pipelines most, and all of it below what estimates can tell."""
    more = ["parallel.expert_model_parallel_size=1", "memory.recompute_granularity=null"]
    config = load(CONFIGS / "qwen3_30b_a3b_ep8.yaml", more)

    def counts(key: str, value: object) -> float:
        costs = (sum(layouts._costs(one, None).values()) for one in (with_value(config, key, value), config))
        return layouts.ALIKE ** (next(costs) - next(costs)) - 1

    sizes = [f"parallel.{name}_parallel_size" for name in ("tensor_model", "expert_model", "context", "pipeline_model")]
    found = [counts(size, 2) for size in sizes]
    assert found == sorted(found) and len({round(one, 4) for one in found}) == 4
    assert found[0] == pytest.approx(0.009, abs=5e-4) and found[-1] == pytest.approx(0.015, abs=5e-4)
    for key, value in (("memory.offload_optimizer", True), ("memory.recompute_granularity", "full")):
        assert counts(key, value) == pytest.approx(0.015, abs=5e-4)
    assert counts("optimizer.grad_reduce_in_fp32", False) == pytest.approx(0.03)
    assert counts(sizes[1], 64) == pytest.approx((1 + found[1]) ** 6 - 1)  # six doublings


@pytest.mark.parametrize(("response", "most"), [(7168, 1), (15360, 2), (31744, 4)])
def test_a_sequence_is_cut_into_pieces_of_8192_tokens_at_least(response: int, most: int) -> None:
    more = [f"rollout.max_response_length={response}", "rollout.max_prompt_length=1024"]
    config = load(CONFIGS / "qwen2.5_7b_tp2.yaml", [*more, f"batch.micro_batch_tokens={1024 + response}"])
    cuts_of = {cut.parallel.context_parallel_size for cut in layouts.Search(config).allowed()}
    assert cuts_of == {size for size in (1, 2, 4) if size <= most}


def test_ranks_of_the_same_weights_share_the_optimizer_whatever_makes_them() -> None:
    """Those of context parallelism have the same weights, too, where there is no data parallelism beside it."""
    config = load(CONFIGS / "qwen3_8b_tp2_cp4_32k.yaml")
    alone = set[tuple[bool, bool]]()
    for cut in layouts.Search(config).allowed():
        own = cut.parallel
        ranks = make_plan(cut).quantities["world_size"] // (
            own.tensor_model_parallel_size * own.pipeline_model_parallel_size
        )
        shares = (cut.optimizer.distributed, own.overlap_grad_reduce)
        assert shares == (ranks > 1, ranks > 1)
        alone |= {shares} if 1 < ranks == own.context_parallel_size else set()
    assert alone == {(True, True)}


def test_what_is_left_is_one_number_wherever_it_stands() -> None:
    """A layout of which 11.8 % is left goes behind one that says so: rounded, the two lines said 11 % and 12 %."""
    found = layouts.find(load(CONFIGS / "qwen3_30b_a3b_ep8.yaml", ["cluster.nodes=1", "cluster.gpu=H100"]), limit=20)
    left = {percent(layout.headroom) for layout in found}
    seen = 0
    for layout in found:
        for reason in layout.reasons:
            if match := re.search(r"that one leaves only (\d+%)", reason):
                assert match[1] in left, reason
                seen += 1
            if match := re.search(r": (\d+)% of the GPU in", reason):
                assert int(match[1]) == 100 - math.floor(100 * layout.headroom), reason
                seen += 1
    assert seen > 2


@pytest.mark.parametrize(("ratio", "words"), [(1.032, "3.2%"), (1.0006, "0.1%"), (1.00012, "0.012%")])
def test_a_gain_is_a_percentage_that_shows_that_it_is_more(ratio: float, words: str) -> None:
    assert layouts._share(ratio) == words


@pytest.mark.parametrize(("headroom", "words"), [(-0.0002, "by 0.1%"), (-0.0112, "by 1.2%"), (-0.12, "by 12%")])
def test_an_excess_is_told_to_a_tenth_of_a_percent_and_never_less_than_it_is(headroom: float, words: str) -> None:
    assert exceeds(headroom).endswith(words)


@pytest.mark.parametrize(
    ("model", "memory", "like"), [("Qwen/Qwen3-8B", 24, "A30-24GB"), ("Qwen/Qwen2.5-32B", 80, "A100-80GB")]
)
def test_the_memory_of_a_card_is_enough_for_a_layout(
    model: str, memory: int, like: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A card that is not known by its name has layouts too, as fixes and as suggestions; the page names its rates."""
    sizes = {"num_generations": 8, "global_batch_size": 128, "steps_per_generation": 4, "micro_batch_tokens": 16384}
    content = {
        "model": {"path": model},
        "cluster": {"gpus_per_node": 8, "gpu_memory_gb": memory},
        "batch": sizes,
        "rollout": {"max_prompt_length": 1024, "max_response_length": 8192},
        "optimizer": {"distributed": True},
        "memory": {"recompute_granularity": "full", "offload_trainer": True},
    }
    config = from_dict(content)
    fixes = fixes_of.find(config)
    assert any(change.key == "parallel.tensor_model_parallel_size" for change in fixes[0].changes), list(
        map(str, fixes)
    )
    larger = [change.value for fix in fixes for change in fix.changes if change.key == "cluster.gpu_memory_gb"]
    assert larger and min(larger) > memory
    written = tmp_path / "run.yaml"
    written.write_text(json.dumps(content))
    assert main.main(["suggest", str(written)]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert f"times assume that they are as fast as {like}" in page and "does not hold" in page
    assert main.main(["suggest", str(written), "--json"]) == 0
    assert {layout["rates_of"] for layout in json.loads(capsys.readouterr().out)} == {like}


def test_no_pipeline_has_more_than_32_stages() -> None:
    """A model of 64 layers on 128 GPUs could have one of 64, of which every stage waits most of the time."""
    cluster = {"gpu": "H100", "nodes": 16, "gpus_per_node": 8}
    config = from_dict({"model": {"path": "Qwen/Qwen2.5-32B"}, "cluster": cluster})
    search = layouts.Search(config)
    every = cuts.every(search.arch, config, frozenset(), search.models)
    assert max(cut.parallel.pipeline_model_parallel_size for cut in every) == 32


@pytest.mark.parametrize(
    ("headroom", "preference", "slower", "memory", "preferred"),
    [
        (0.048, 2.0, 1.02, False, True),  # which alone is enough
        (0.0, 0.0, 1.02, True, False),
        (0.0, 2.0, 1.02, True, False),  # memory alone is enough, and comes first
        (0.0, 2.0, 1.23, True, True),  # neither alone
    ],
)
def test_of_memory_and_preference_the_one_that_decides_is_named(
    headroom: float, preference: float, slower: float, memory: bool, preferred: bool
) -> None:
    def candidate(seconds: float, headroom: float, preference: float) -> Any:
        times, memory = SimpleNamespace(rollout=seconds), SimpleNamespace(headroom=headroom)
        return SimpleNamespace(times=times, memory=memory, costs={"more tensor parallelism": preference})

    text = layouts._before_faster(candidate(slower, 0.05, 0.0), [candidate(1.0, headroom, preference)])
    assert ("leaves only" in text) == memory and ("has more tensor parallelism" in text) == preferred, text
