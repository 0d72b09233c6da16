"""The sizes that `suggest` advises, against figures of which the answer is known (a second).

Catches another share of the best than docs/plan.md states, other bounds of what is tried, and other sizes than it
states where a config has none.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config import paths
from gspo_hpc.config.loader import load
from gspo_hpc.config.schema import Config, replace
from gspo_hpc.planning import layouts
from gspo_hpc.planning.estimates import memory
from gspo_hpc.planning.estimates.phases import HEADROOM
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.planning.suggest import batches

PRESET = paths.PACKAGE.parent / "configs" / "qwen2.5_7b_tp2.yaml"


def advised(monkeypatch: pytest.MonkeyPatch, rates: dict[int, float], *more: str) -> dict[str, batches.Advice]:
    """Return the advice for a layout with which an update of each size reaches so many tokens a second."""
    search = layouts.Search(load(PRESET, ["batch.global_batch_size=64", *more]))
    one = search.ranked(1)[0]

    def times(changed: Config, found: Any) -> Any:
        rate = rates.get(changed.batch.global_batch_size or 0, 1.0)
        return SimpleNamespace(tokens=1000.0, rollout=1000.0 / rate)

    monkeypatch.setattr(search, "times", times)
    return {item.key: item for item in batches.advise(search, one)}


@pytest.mark.parametrize(
    ("rates", "size"),
    [
        ({64: 90, 128: 95, 256: 97, 512: 99, 1024: 100}, 64),  # nine tenths of the best are enough
        ({64: 89, 128: 91, 256: 97, 512: 99, 1024: 100}, 128),  # and less is not
        ({64: 50, 128: 70, 256: 85, 512: 89, 1024: 100}, 1024),  # the largest that is tried is 16 times as large
        ({64: 100, 128: 100, 256: 100, 512: 100, 1024: 100}, 64),
    ],
)
def test_the_smallest_update_that_reaches_nine_tenths_of_the_best(
    rates: dict[int, float], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = advised(monkeypatch, rates)["batch.global_batch_size"]
    assert found.value == size
    gain = f"{rates[size] / rates[64] - 1:.0%} more tokens a second than with 64"
    assert found.reason.startswith("enough: 1024 completions" if size == 64 else gain)
    if size == 1024:
        assert "; none larger was tried." in found.reason
    elif size > 64:
        assert f"; 1024 would bring {100 / rates[size] - 1:.0%} more." in found.reason


@pytest.mark.parametrize(("gbs", "size"), [(64, 1024), (512, 4096)])
def test_what_larger_updates_bring_is_what_they_bring(gbs: int, size: int) -> None:
    """Check with the estimates themselves, of a small model on one GPU that gains with every doubling to the end."""
    small = ["model.path=Qwen/Qwen2.5-0.5B-Instruct", "cluster.gpu=RTX4090", "cluster.gpus_per_node=1"]
    lengths = ["rollout.max_prompt_length=256", "rollout.max_response_length=768", "batch.micro_batch_tokens=1024"]
    sizes = [f"batch.global_batch_size={gbs}", "batch.steps_per_generation=1", "batch.num_generations=8"]
    search = layouts.Search(load(PRESET, [*small, *lengths, *sizes]))
    one = search.ranked(1)[0]
    (found,) = (item for item in batches.advise(search, one) if item.key == "batch.global_batch_size")

    def tokens_per_s(size: int) -> float:
        times = search.times(batches._with_batch(one.config, size, 1), one.memory)
        return times.tokens / times.rollout

    assert found.value == size
    gain = f"{tokens_per_s(size) / tokens_per_s(gbs) - 1:.0%} more tokens a second than with {gbs}; "
    largest = f"{16 * gbs} would bring {tokens_per_s(16 * gbs) / tokens_per_s(size) - 1:.0%} more. "
    assert found.reason.startswith(gain + ("none larger was tried. " if size == 16 * gbs else largest))
    assert tokens_per_s(2 * 1024) > 1.2 * tokens_per_s(1024)


@pytest.mark.parametrize(
    ("preset", "gpu"), [("30b_a3b_ep8", "H100"), ("30b_a3b_ep8", "H20"), ("8b_tp2_cp4_32k", "H100")]
)
def test_a_larger_budget_leaves_as_much_of_the_gpu_as_the_layout_or_what_peaks_need(preset: str, gpu: str) -> None:
    """With larger micro-batches steps are shorter, until a peak ends the run."""
    search = layouts.Search(load(PRESET.parent / f"qwen3_{preset}.yaml", [f"cluster.gpu={gpu}"]))
    for one in search.ranked(2):
        (budget,) = (item for item in batches.advise(search, one) if item.key == "batch.micro_batch_tokens")
        changed = replace(one.config, batch=replace(one.config.batch, micro_batch_tokens=budget.value))
        left = memory.estimate(search.arch, changed, search.device).headroom
        assert left >= min(HEADROOM, one.memory.headroom)


def test_the_page_states_the_share(project: Path) -> None:
    page = " ".join((project / "docs" / "plan.md").read_text("utf-8").split())
    assert re.search(r"the smallest update that reaches nine tenths of the tokens a second", page)
    assert batches.ENOUGH == 0.9


def test_layouts_without_batch_sizes_are_timed_for_those_of_the_page(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are told, and a config that gives them has the same layouts in the same time."""
    page = " ".join((project / "docs" / "plan.md").read_text("utf-8").split())
    found = re.search(
        r"timed for (\d+) completions of a rollout for each GPU, in (\d+) updates, (\d+) of a prompt", page
    )
    assert found is not None
    each, updates, group = map(int, found.groups())
    (bare := tmp_path / "bare.yaml").write_text(
        "model: {path: Qwen/Qwen2.5-0.5B}\ncluster: {gpu: H100, gpus_per_node: 2, nodes: 2}\n"
    )
    assert main(["suggest", str(bare), "--json", "--limit=1"]) == 0
    told = capsys.readouterr()
    sizes = {
        "batch.num_generations": group,
        "batch.generation_batch_size": 4 * each,
        "batch.global_batch_size": 4 * each // updates,
    }
    given = [f"{key}={value}" for key, value in sizes.items()]
    assert f"layouts are timed for {', '.join(given)}, as is usual" in " ".join(told.err.split())
    assert main(["suggest", str(bare), *given, "--json", "--limit=1"]) == 0
    same = capsys.readouterr()
    assert "as is usual" not in same.err
    (one,), (other,) = json.loads(told.out), json.loads(same.out)
    assert one["settings"] == other["settings"] and one["seconds"] == pytest.approx(other["seconds"])


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize(
    ("given", "value", "reason"), [(1, 1, "on-policy"), (4, 4, "at most 4"), (8, 4, "the last of 8")]
)
def test_updates_of_a_rollout(
    given: int, value: int, reason: str, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds over the same completions divide a rollout into no more parts."""
    if given == 1 and rounds > 1:
        reason = "a pass over a rollout is one update"  # the second round has other ratios than 1
    words = [f"batch.steps_per_generation={given}", f"batch.num_iterations={rounds}"]
    found = advised(monkeypatch, {}, *words)["batch.steps_per_generation"]
    assert found.value == value and found.reason.startswith(reason)


def test_the_budget_is_the_smallest_of_those_about_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A percent more time is about as fast; two are not."""
    search = layouts.Search(load(PRESET))
    one = search.ranked(1)[0]
    rollout = one.config.rollout
    longest = rollout.max_prompt_length + rollout.max_response_length
    seconds = {longest: 102.0, 2 * longest: 100.9, 4 * longest: 100.0, 8 * longest: 100.5}
    tried = []

    def times(changed: Config, found: Any) -> Any:
        tried.append(changed.batch.micro_batch_tokens)
        return SimpleNamespace(tokens=1000.0, rollout=seconds[changed.batch.micro_batch_tokens or 0])

    monkeypatch.setattr(search, "times", times)
    monkeypatch.setattr(batches.memory, "fits", lambda found, config: True)
    monkeypatch.setattr(batches, "HEADROOM", -100.0)
    (budget,) = batches._budget(search, one)
    assert tried == list(seconds) and budget.value == 2 * longest and "room for 2" in budget.reason


def test_a_layout_that_is_tight_gets_a_budget_that_leaves_as_much() -> None:
    search = layouts.Search(load(PRESET, ["cluster.gpus_per_node=2", "rollout.max_response_length=1024"]))
    one = search.ranked(1)[0]
    assert 0.0 < one.memory.headroom < batches.HEADROOM
    assert [advice.value for advice in batches._budget(search, one)] == [2048]


@pytest.mark.parametrize(
    ("words", "on_policy"),
    [
        ([], True),
        (["rollout.unfinished=continue", "rollout.oversampling_factor=1.5"], False),
        (["rollout.unfinished=drop", "rollout.oversampling_factor=1.5"], True),
        (["algorithm.correction=bypass"], False),
        (["algorithm.name=gspo_token", "algorithm.top_entropy_quantile=0.2"], False),
    ],
)
def test_ratios_are_not_called_1_where_the_weights_that_sampled_are_gone(
    words: list[str], on_policy: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["suggest", "qwen2.5_7b_tp2", "batch.steps_per_generation=1", *words, "--limit=1"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert ("every ratio is 1" in told) is on_policy and "batch.steps_per_generation=1" in told
    config = load(Path("configs/qwen2.5_7b_tp2.yaml"), ["batch.steps_per_generation=1", *words])
    inert = any("clipping is inert" in one for one in make_plan(config).warnings)
    assert inert is (on_policy or "algorithm.name=gspo_token" in words)
