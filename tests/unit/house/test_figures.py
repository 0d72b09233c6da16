"""Figures in the pages: those that the code can tell are the code's, measured ones those of the page with the command.

It takes a second, and catches a constant that was changed without its page, a README whose measurements are older than
those in docs, a figure in README that nothing holds, and a measurement without the command that repeats it.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from gspo_hpc.cli.commands.runs import status
from gspo_hpc.cli.pages import ranks, render
from gspo_hpc.config import constants
from gspo_hpc.diagnose import evidence
from gspo_hpc.diagnose.symptoms import balance, learning, speed
from gspo_hpc.doctor import examine, inputs, nodes
from gspo_hpc.launch import watch
from gspo_hpc.launch.slurm import commands, supervisor, unhold
from gspo_hpc.models import architecture, catalog
from gspo_hpc.planning.estimates import activations, parameters
from gspo_hpc.planning.rules import platform
from gspo_hpc.system.text import MIB
from tests import pages
from tests.unit.house import test_layers

WORDS = "a two three four five six seven eight nine ten".split()
PARTS = {"twice": 2.0, "half": 0.5, "quarter": 0.25, "tenth": 0.1, "twentieth": 0.05}
DATED = re.compile(r"`python (?:tools/|-m )[^`]+`, 20\d\d-\d\d-\d\d")


def read(name: str) -> str:
    return (pages.PROJECT / name).read_text("utf-8")


def number(text: str) -> float:
    """A number in digits or as a word."""
    if text in PARTS:
        return PARTS[text]
    return float(WORDS.index(text) + 1) if text in WORDS else float(text.replace(",", ""))


def in_file(name: str, pattern: str) -> tuple[float, ...]:
    """The numbers in the only place of a file that fits the pattern."""
    (found,) = set(re.findall(pattern, read(name)))
    return tuple(map(number, (found,) if isinstance(found, str) else found))


def planned(command: str, *path: str) -> float:
    """A number of the JSON of a plan, by the command that a page names."""
    words = [sys.executable, "-m", "gspo_hpc", *command.split()[1:], "--json"]
    found = json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=False, cwd=pages.PROJECT).stdout)
    for key in path:
        found = found[key]
    return float(found)


def of_a_thousand() -> tuple[float, ...]:
    """Seconds of a rollout and of a step, by the command of docs/scale.md."""
    (command,) = re.findall(r"`(gspo-hpc plan [^`]+)` estimates", read("docs/scale.md"))
    return tuple(round(planned(command, "time", key), 1) for key in ("seconds_per_rollout", "seconds_per_step"))


def syncs() -> tuple[float, ...]:
    """Seconds of a weight sync with the trainer on the GPU, by the command of docs/weight-sync.md."""
    configs = ("qwen3_30b_a3b_ep8", "qwen3_235b_a22b_tp4_pp2_ep32")
    command = "gspo-hpc plan {} memory.offload_parts=[]"
    return tuple(float(f"{planned(command.format(one), 'time', 'phases', 'sync'):.2g}") for one in configs)


def rooms() -> tuple[float, ...]:
    return (float(len(list((pages.PROJECT / "gspo_hpc").glob("*/__init__.py")))),)


def pythons() -> tuple[float, ...]:
    least, most = re.findall(
        r"not (\(\d+, \d+\)) <= sys\.version_info\[:2\] <= (\(\d+, \d+\))", read("tools/setup_env.sh")
    )[0]
    return tuple(float(ast.literal_eval(bound)[1]) for bound in (least, most))


def experts_of_a_token() -> tuple[float, ...]:
    arch = architecture.parse(catalog.content("Qwen3-30B-A3B"))
    assert arch.experts is not None
    return (float(arch.num_layers * arch.experts.top_k),)


def parameters_of_smollm2() -> int:
    return parameters.parameters(architecture.parse(catalog.content("SmolLM2-135M")))


def scores(config: str) -> tuple[list[int], list[int]]:
    """Accuracies before and after in the first table of docs/results.md about a config, in per cent."""
    section = read("docs/results.md").split(f"\n## configs/{config}.yaml\n")[1].split("\n## ")[0]
    (table,) = re.findall(r"(?m)^\|---.*\n((?:\| .*\n)+)", section)[:1]
    rows = [line.split("|") for line in table.splitlines()]
    return [round(100 * float(row[2])) for row in rows], [round(100 * float(row[3])) for row in rows]


def learned() -> tuple[float, ...]:
    """Return the figures of README about both configs: seeds; before, least and most after; before and after."""
    before, after = scores("smollm2_cpu")
    tiny_before, tiny_after = scores("tiny_cpu")
    assert len(set(before)) == len(set(tiny_before)) == 1
    seeds, tiny_seeds = len(after), len(tiny_after)
    return (before[0], min(after), max(after), seeds, tiny_before[0], min(tiny_after), max(tiny_after), tiny_seeds)


FOUR_NODES = in_file("slurm/local_cluster.sh", r"(?m)^NODES=(\d+) ")
PYTHONS = r"Python 3\.(\d+) to 3\.(\d+)"
FIGURES: list[tuple[str, str, Callable[[], tuple[float, ...]]]] = [
    ("README.md", r"(\d+) sub-packages", rooms),
    ("README.md", PYTHONS, pythons),
    (
        "README.md",
        r"to add two\s+numbers up to (\d+)",
        lambda: in_file("tools/make_arithmetic.py", r'"sum20": Kind\("\+", 1, (\d+),'),
    ),
    ("README.md", r"a real Slurm whose (\w+) nodes are on one machine", lambda: FOUR_NODES),
    (
        "README.md",
        r"from (\d+) % to (\d+)–(\d+) % with (\w+) seeds; that of the tiny model rose from (\d+) % to (\d+)–(\d+) % "
        r"with (\w+)\.",
        learned,
    ),
    (
        "README.md",
        r"a step of TRL takes (\S+) to (\S+) times as long",
        lambda: tuple(
            round(one, 1) for one in in_file("docs/benchmarks.md", r"\*\*[\d.]+ \(([\d.]+) – ([\d.]+)\)\*\* \| \*\*")
        ),
    ),
    ("ARCHITECTURE.md", r"holds (\d+) rooms", rooms),
    ("CONTRIBUTING.md", PYTHONS, pythons),
    ("CONTRIBUTING.md", r"a real Slurm of (\w+) nodes", lambda: FOUR_NODES),
    (
        "CONTRIBUTING.md",
        r"at most (\d+) lines, a folder at most (\d+) files",
        lambda: (test_layers.LINES, test_layers.MODULES),
    ),
    ("docs/slurm.md", r"a real Slurm of (\w+) nodes", lambda: FOUR_NODES),
    ("docs/slurm.md", r"Python 3\.(\d+) or newer", lambda: pythons()[:1]),
    (
        "docs/parallelism.md",
        r"buckets of (\d+) MiB on CPUs and (\d+) MiB on GPUs",
        lambda: tuple(constants.GATHER_BUCKET_BYTES[kind] / MIB for kind in ("cpu", "cuda")),
    ),
    ("docs/parallelism.md", r"which is (\d+) bytes per token for Qwen3-30B-A3B", experts_of_a_token),
    ("docs/parallelism.md", r"ranks, with as many as (\d+) of them on each node", lambda: (platform._DEEPEP_NODE,)),
    (
        "docs/parallelism.md",
        r"are those of one rank within (\S+) \(norm",
        lambda: in_file("tests/gloo/reference.py", r"<= (\S+) \* scale"),
    ),
    (
        "docs/parallelism.md",
        r"Log-probs and logits are within (\S+) of those of transformers",
        lambda: in_file("tests/gloo/test_megatron.py", r"assert worst < (\S+),"),
    ),
    (
        "docs/parallelism.md",
        r"with samples of ([\d,]+), ([\d,]+) and ([\d,]+) tokens",
        lambda: in_file("tests/gloo/cases.py", r"LENGTHS = \((\d+), (\d+), (\d+)\)"),
    ),
    (
        "docs/plan.md",
        r"or within (\d+) % where a distributed optimizer",
        lambda: (100 * in_file("tests/gloo/reference.py", r"slack = ([\d.]+) if")[0],),
    ),
    (
        "docs/plan.md",
        r"within (\d+) % on the CPU, or (\d+) % over expert-parallel ranks",
        lambda: (
            100 * in_file("tests/gloo/test_megatron.py", r"rtol=([\d.]+) if even")[0],
            100 * (activations.IMBALANCE - 1),
        ),
    ),
    ("docs/plan.md", r"from (\d+) to (\d+) columns", lambda: (render._NARROWEST, render._WIDEST)),
    ("docs/plan.md", r"Up to (\d+) ranks have a row each", lambda: (ranks._MAX_ROWS,)),
    ("docs/plan.md", r"files of text \(JSONL, CSV\) up to (\d+) MiB", lambda: (constants.WHOLE_FILE_BYTES / MIB,)),
    (
        "docs/doctor.md",
        r"of files above (\d+) MiB the first ([\d,]+) lines",
        lambda: (constants.WHOLE_FILE_BYTES / MIB, inputs.ROWS),
    ),
    (
        "docs/doctor.md",
        r"a limit of\s+(\w+) minutes \((\w+) with `--groups`\)",
        lambda: (nodes.job_minutes(False), nodes.job_minutes(True)),
    ),
    ("docs/doctor.md", r"`--wait` seconds \((\d+)\)", lambda: (examine.WAIT_SECONDS,)),
    ("docs/scale.md", r"estimates ([\d.]+) s for a rollout[^.]*? steps, ([\d.]+) s a step", of_a_thousand),
    ("docs/weight-sync.md", r"_a3b_ep8`: 8 H200 \| ([\d.]+) \|[\s\S]*?_ep32`: 128 H200 \| ([\d.]+) \|", syncs),
    (
        "docs/diagnose.md",
        r"the last (\d+) steps \(at least (\w+) rollouts\)",
        lambda: (evidence.RECENT, evidence.ENOUGH),
    ),
    ("docs/diagnose.md", r"fewer than (\w+) steps", lambda: (evidence.ENOUGH,)),
    ("docs/diagnose.md", r"`device_use` \(above ([\d.]+)\)", lambda: (speed.DEVICE_USE,)),
    ("docs/diagnose.md", r"`communication_over_computation` \(below ([\d.]+)\)", lambda: (speed.COMMUNICATION,)),
    ("docs/diagnose.md", r"for (\d+) % of the generation time", lambda: (100 * balance.TAIL,)),
    ("docs/diagnose.md", r"less than ([\d.]+) times the work or the speed", lambda: (balance.ENGINE_BUSY,)),
    ("docs/diagnose.md", r"has a (\w+) more tokens than the mean", lambda: (round(balance.UNEVEN_PACKING - 1, 6),)),
    ("docs/diagnose.md", r"micro-batches are (\w+) empty", lambda: (balance.FILL,)),
    ("docs/diagnose.md", r"in (\w+) of four steps", lambda: (4 * balance.STRAGGLER_STEPS,)),
    ("docs/diagnose.md", r"four steps, by a (\w+),", lambda: (balance.STRAGGLER - 1,)),
    ("docs/diagnose.md", r"of a layer has (\w+) the mean", lambda: (balance.EXPERTS_UNEVEN,)),
    ("docs/diagnose.md", r"gradient norm (\w+) times that of the first", lambda: (learning.GRADIENT_GROWTH,)),
    ("docs/diagnose.md", r"differ (\w+) times as much as at first", lambda: (learning.GAP_GROWTH,)),
    (
        "docs/diagnose.md",
        r"completions are (\w+) as long as at first and longer than (\w+) of the limit",
        lambda: (learning.LENGTH_GROWTH, learning.LENGTH_OF_LIMIT),
    ),
    ("docs/diagnose.md", r"a (\w+) of the completions or more is cut off", lambda: (learning.TRUNCATED,)),
    ("docs/diagnose.md", r"in (\w+) of the groups or more", lambda: (constants.ZERO_VARIANCE,)),
    ("docs/diagnose.md", r"(\w+) of the ratios or more are clipped", lambda: (constants.OVERCLIPPED,)),
    ("docs/diagnose.md", r"more than (\d+) nat a token from the reference", lambda: (constants.RUNAWAY_KL,)),
    ("docs/diagnose.md", r"more than ([\d.]+) nats a token away from", lambda: (constants.LARGE_UPDATE,)),
    ("docs/diagnose.md", r"count as (\w+) of them or fewer", lambda: (constants.FEW_EFFECTIVE,)),
    ("docs/diagnose.md", r"(\w+) of the terms or more are bounded or dropped", lambda: (constants.OVERCLIPPED,)),
    ("docs/diagnose.md", r"is a (\w+) of what it was at first, or less", lambda: (constants.COLLAPSED,)),
    ("docs/diagnose.md", r"no ratio was clipped in (\d+) updates", lambda: (constants.INERT_UPDATES,)),
    ("docs/diagnose.md", r"at (\d+) nat a token from the reference model", lambda: (constants.RUNAWAY_KL,)),
    ("docs/diagnose.md", r"at ([\d.]+) nats a token from the policy", lambda: (constants.LARGE_UPDATE,)),
    ("docs/diagnose.md", r"when a (\w+) of the first entropy is left", lambda: (constants.COLLAPSED,)),
    ("docs/diagnose.md", r"no step for (\w+) times as long", lambda: (speed.NO_PROGRESS,)),
    (
        "docs/diagnose.md",
        r"`device_use` is below (\d+) % \(a problem below (\d+) %\)",
        lambda: (100 * speed.DEVICE_USE, 100 * speed.DEVICE_USE_LOW),
    ),
    ("docs/diagnose.md", r"differs by more than (\d+) % between steps", lambda: (100 * speed.MEMORY_SWING,)),
    ("docs/diagnose.md", r"a (\w+) of the step or more is spent waiting", lambda: (evidence.SLOW,)),
    ("docs/diagnose.md", r"for checkpoints a (\w+) of the time or more", lambda: (evidence.SLOW,)),
    (
        "docs/faults.md",
        r"have (\d+) s to end by themselves and are ended within (\d+) s in all",
        lambda: (
            watch.LINGER,
            watch.LINGER + supervisor._ANSWER + supervisor._STACKS + supervisor._ENDING + 2 * supervisor._LEAVING,
        ),
    ),
    ("docs/faults.md", r"shortens this wait to (\w+) seconds", lambda: (commands._START_SECONDS,)),
    ("docs/faults.md", r"StartTime=now\+(\d+)", lambda: (commands._START_SECONDS,)),
    (
        "docs/slurm-admin.md",
        r"asks (\w+) a second, for at most (\w+) minutes",
        lambda: (1 / unhold._POLL, unhold._PATIENCE / 60),
    ),
    ("docs/slurm-admin.md", r"sends one every (\w+) seconds", lambda: (status._WATCH_SECONDS,)),
    (
        "docs/profiling.md",
        r"sampled (\w+) a second",
        lambda: (1 / in_file("gspo_hpc/training/telemetry/accelerator.py", r"_SAMPLE_SECONDS = ([\d.]+)")[0],),
    ),
    (
        "configs/smollm2_cpu.yaml",
        r"# ([\d.]+) GB each in float32: weights and Adam's two moments",
        lambda: (round(3 * 4 * parameters_of_smollm2() / 1e9, 1),),
    ),
    ("tools/prepare_smollm2.py", r"safetensors \((\d+) MB\)", lambda: (round(4 * parameters_of_smollm2() / 1e6),)),
]


@pytest.mark.parametrize(("page", "pattern", "told"), FIGURES, ids=[f"{page}: {text}" for page, text, _ in FIGURES])
def test_a_figure_is_what_the_code_says(page: str, pattern: str, told: Callable[[], tuple[float, ...]]) -> None:
    assert in_file(page, pattern) == pytest.approx(told())


def test_expert_ranks_of_deepep() -> None:
    (listed,) = re.findall(r"an `ETP x EP` of ([\d, or]+) ranks", read("docs/parallelism.md"))
    assert tuple(map(int, re.findall(r"\d+", listed))) == platform._DEEPEP_RANKS


def test_versions_of_the_environment() -> None:
    """The first rows of the table in CONTRIBUTING.md are what is installed."""
    pins = dict(re.findall(r"(?m)^([\w-]+)==([\w.]+)$", read("tools/requirements/cpu.txt")))
    (pins["torch"],) = set(re.findall(r"TORCH:-torch==([\d.]+)\+cpu", read("tools/setup_env.sh")))
    text = read("CONTRIBUTING.md")
    (installed,) = re.findall(r"\| CPU, Python 3\.11: ([^|]+) \|", text)
    for name, version in re.findall(r"([\w-]+) ([\d.]+)(?:, |$)", installed):
        assert pins[name].removesuffix(".0") == version.removesuffix(".0"), name
    (second,) = re.findall(r'(?m)^MEGATRON="([\d.]+)"', read("tools/second_lane.sh"))
    assert f"megatron-core {second} | `bash tools/second_lane.sh` |" in text


@pytest.mark.parametrize(
    ("page", "pattern", "source", "pin"),
    [
        ("tools/bench/README.md", r"/trl/\) ([\d.]+) for", "tools/bench/peers.txt", r"(?m)^trl==([\d.]+)"),
        ("tools/bench/README.md", r"/verl/\) ([\d.]+) for", "tools/bench/peers.txt", r"(?m)^verl==([\d.]+)"),
        ("docs/benchmarks.md", r"TRL ([\d.]+)'s", "tools/bench/peers.txt", r"(?m)^trl==([\d.]+)"),
        ("docs/parallelism.md", r"DeepEP ([\d.]+)", "gspo_hpc/doctor/versions.py", r"DeepEP@v([\d.]+)"),
        ("docs/parallelism.md", r"against release\s([\d.]+)", "gspo_hpc/policy/bridged.py", r"release ([\d.]+)"),
    ],
)
def test_a_version_is_the_one_that_is_used(page: str, pattern: str, source: str, pin: str) -> None:
    (told,), (used,) = re.findall(pattern, read(page)), re.findall(pin, read(source))
    assert f"{used}.".startswith(f"{told}.")


def loose_figures(text: str) -> list[str]:
    """Figures of README, in digits or as words, that no entry of FIGURES holds."""
    text = pages.prose(text)
    for page, pattern, _ in FIGURES:
        text = re.sub(pattern, "", text) if page == "README.md" else text
    text = re.sub(r"`[^`]+`|\]\([^)]*\)", "", text)
    words = "|".join([*WORDS[2:], "eleven", "twelve", "twenty", "half a", "third", "quarter", "tenth", "dozen"])
    return re.findall(rf"(?<![\w.-])\d[\d.,]*\b(?: ?%)?|\b(?:{words})\b", text)


def test_the_readme_has_no_figure_that_nothing_holds() -> None:
    assert loose_figures(read("README.md")) == []


@pytest.mark.parametrize("page", ["benchmarks", "results"])
def test_measurements_have_their_command_and_date(page: str) -> None:
    _, *sections = re.split(r"(?m)^## ", read(f"docs/{page}.md"))
    assert sections and [part.splitlines()[0] for part in sections if not DATED.search(part)] == []


def test_planted_figures_are_found() -> None:
    assert loose_figures("It has 21 sub-packages, FP8 and `1 x 2`, and takes 3 s, a quarter or 4 %.\n") == [
        "3",
        "quarter",
        "4 %",
    ]
    assert DATED.search("`python tools/a.py --b 3`, 2026-11-21:") and not DATED.search("`python tools/a.py`: 3 s")
    assert (number("four"), number("1,000"), number("twice"), number("0.3")) == (4.0, 1000.0, 2.0, 0.3)
