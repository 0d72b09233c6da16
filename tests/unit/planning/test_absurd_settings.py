"""Whatever is typed behind `plan` and `suggest`, there is a page, or a line or two that help; never a traceback."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gspo_hpc.cli.main import main
from gspo_hpc.config.schema import keys

PRESETS = sorted(map(str, (Path(__file__).parents[3] / "configs").glob("*.yaml")))
KEYS = [*keys()]
ENGINE = [
    f"rollout.engine.{name}" for name in ("max_num_seqs", "gpu_memory_utilization", "max_num_batched_tokens", "x")
]
VALUES = (
    *("0", "-1", "1", "2", "3", "7", "256", "2048", "100000", "1000000000", "9" * 21, "0.5", "1e9", "1e-400"),
    *(
        "nan",
        "inf",
        "-inf",
        "null",
        "true",
        "[]",
        "{}",
        "[1,2]",
        "[mlp]",
        "{a: 1}",
        "'",
        "abc",
        "'é'",
        "full",
        "server",
    ),
    *("H100", "B200", "Qwen/Qwen3-8B", "Qwen3-235B-A22B", "float16", "auto", "/nowhere", "!!python/object:os.system"),
)


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(["plan", "suggest"]),
    st.sampled_from(PRESETS),
    st.lists(
        st.tuples(st.sampled_from(KEYS) | st.sampled_from(ENGINE), st.sampled_from(VALUES)), min_size=1, max_size=3
    ),
)
@example(
    "plan", PRESETS[0], [("cluster.gpu", "H100"), ("model.path", "Qwen/Qwen3-8B"), ("cluster.network_gb_per_s", "0")]
)
@example("suggest", PRESETS[0], [("cluster.network_gb_per_s", "1e-300")])
@example("plan", PRESETS[0], [("slurm.container", "{a: 1}")])
@example("plan", PRESETS[0], [("rollout.engine.gpu_memory_utilization", "[]")])
def test_there_is_a_page_or_a_line(command: str, preset: str, given: list[tuple[str, str]]) -> None:
    page, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(page), contextlib.redirect_stderr(told):
        code = main([command, preset, *(f"{key}={value}" for key, value in given)])
    assert code in ((0, 2, 3) if command == "plan" else (0, 2))  # 3: the data of a preset are not here
    lines = told.getvalue().splitlines()
    assert page.getvalue().strip() or 1 <= len(lines) <= 1 + len(given), lines
