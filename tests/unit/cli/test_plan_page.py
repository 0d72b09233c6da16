"""The page of plan. Takes milliseconds; catches a row that hides what a fix replaces or costs, or has a wrong size."""

from __future__ import annotations

from gspo_hpc.cli.pages.plan import page
from gspo_hpc.cli.pages.render import lines
from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.reading.places import Places
from gspo_hpc.planning.fixes.search import Change, Fix
from gspo_hpc.planning.plan import make_plan


def test_a_fix_is_shown_with_what_it_replaces_and_the_warnings_that_it_adds() -> None:
    config = from_dict({"batch": {"global_batch_size": 6, "num_generations": 4}})
    fixes = [
        Fix((Change("batch.num_generations", 4, 3),)),
        Fix((Change("batch.micro_batch_size", None, 2), Change("parallel.sequence_parallel", False, True)), warnings=1),
        Fix((Change("cluster.gpu", "H100", None),), warnings=2),
    ]
    shown = [" ".join(line.split()) for line in lines(page("x", config, make_plan(config), Places(), fixes))]
    at = shown.index("Fixes (add one to the command, or write it into the file)")
    assert shown[at + 1 : at + 5] == [
        "batch.num_generations=3 now 4",
        "batch.micro_batch_size=2 parallel.sequence_parallel=true now batch.micro_batch_size not given,",
        "parallel.sequence_parallel=false; 1 more warning",
        "cluster.gpu=null now H100; 2 more warnings",
    ]


def test_experts_divide_the_ranks_in_their_own_way() -> None:
    parallel = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}
    config = from_dict({"cluster": {"gpus_per_node": 8}, "parallel": parallel})
    shown = [" ".join(line.split()) for line in lines(page("x", config, make_plan(config), Places()))]
    assert "ranks TP 2 x PP 1 x CP 1 x DP 4 = 8" in shown
    assert "experts ETP 1 x EP 4 x PP 1 x DP 2 = 8" in shown
