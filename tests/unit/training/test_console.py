"""The console: plain lines in logs, an aligned table and a bar on a terminal, and nothing that can cost a run."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from typing import Any

import pytest

from gspo_hpc.config import loader
from gspo_hpc.runs.console_columns import COLUMNS, of_run
from gspo_hpc.system.text import duration
from gspo_hpc.training.telemetry import console as console_module
from gspo_hpc.training.telemetry.console import ROWS_PER_HEADER, Console, clean

USUAL = of_run(teacher=False, rewards=True)
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def record(step: int, **changes: Any) -> dict[str, Any]:
    phases = {"generate": 7.25, "old_logprobs": 1.0, "reference": 0.5, "update": 4.125, "sync": 0.3}
    values = {
        "step": step,
        "rollout": step - 1,
        "update": 0,
        "reward": 0.5625,
        "response_length": 12.34,
        "clip_fraction": 0.125,
        "logprob_gap_max": 2.3e-6,
        "grad_norm": 1.5,
        "entropy": 0.75,
        "seconds": 12.0,
        "completion_tokens_per_s": 83.0,
        "engine_restarts": 0,
    }
    return values | {f"seconds/{name}": value for name, value in phases.items()} | changes


def plain(total: int = 60) -> tuple[io.StringIO, Console]:
    stream = io.StringIO()
    return stream, Console(stream, total)


def on_terminal(width: int, use: Any) -> str:
    """Everything that `use(console)` sends to a terminal of `width` columns."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    chunks: list[bytes] = []

    def read() -> None:
        try:
            while chunk := os.read(master, 65536):
                chunks.append(chunk)
        except OSError:
            pass

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(slave, "w", encoding="utf-8") as stream:
        console = Console(stream, 60)
        assert not console.plain
        use(console)
    reader.join(10)
    os.close(master)
    return b"".join(chunks).decode()


@pytest.fixture(autouse=True)
def terminal_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_plain_lines_have_no_control_characters() -> None:
    stream, console = plain()
    console.header(["gspo_hpc \x1b[1mname", "a\tb"])
    with console.rollout(3, 64) as bar:
        bar.advance(64, 1000)
    console.step(record(1, skipped=1, failures=2))
    console.note("evil \x1b[31m\x07 \u202e text\nsecond line")
    console.warn("look\rhere")
    text = stream.getvalue()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)
    assert "second line\n" in text
    assert "warning: look?here" in text or "warning: look\nhere" in text


def test_a_row_says_the_step() -> None:
    stream, console = plain()
    console.step(record(7))
    titles, row = stream.getvalue().splitlines()
    cells = dict(zip(titles.split(), row.split(), strict=True))
    assert cells == {
        "step": "7/60",
        "reward": "0.562",
        "length": "12.3",
        "clip": "0.12",
        "gap": "2.3e-06",
        "grad": "1.5",
        "entropy": "0.750",
        "generate": "7.2",
        "logprobs": "1.5",
        "update": "4.1",
        "sync": "0.3",
        "seconds": "12.0",
        "tok/s": "83",
        "left": "10m36s",
    }


def test_columns_stay_aligned_whatever_the_values() -> None:
    stream, console = plain(12345)
    odd: list[dict[str, Any]] = [
        {},
        {"reward": None, "logprob_gap_max": float("nan"), "grad_norm": float("inf"), "entropy": "x"},
        {"reward": -123.4, "response_length": 31999.0, "logprob_gap_max": 0.0, "grad_norm": 123456.0},
        {"completion_tokens_per_s": 1234567.0, "seconds": 86400.0, "seconds/generate": 4000.0},
        {"seconds/sync": 1234.5, "seconds/update": 12345.6, "clip_fraction": 0.999, "seconds": 1e9},
        {"seconds/update": 0.0, "clip_fraction": 1.0, "step": 12345},
    ]
    for step, changes in enumerate(odd, 1):
        console.step(record(step) | changes)
    lines = stream.getvalue().splitlines()
    ends = [match.end() for match in re.finditer(r"\S+", lines[0])]
    for line in (line for line in lines[1:] if "^" not in line):
        assert [match.end() for match in re.finditer(r"\S+", line)] == ends, line


def test_missing_values_are_dashes_and_an_evaluation_has_no_row() -> None:
    stream, console = plain()
    console.step({"step": 0, "eval/accuracy": 0.4})
    assert stream.getvalue() == ""
    console.step({"step": 1, "loss": 0.0})
    assert stream.getvalue().splitlines()[1].split() == ["1/60"] + ["-"] * (len(USUAL) - 1)


def test_the_header_comes_again() -> None:
    stream, console = plain(100)
    for step in range(1, 2 * ROWS_PER_HEADER + 2):
        console.step(record(step))
    titles = [index for index, line in enumerate(stream.getvalue().splitlines()) if "reward" in line]
    assert titles == [0, ROWS_PER_HEADER + 1, 2 * (ROWS_PER_HEADER + 1)]


def test_time_left_counts_whole_rollouts() -> None:
    """The first update of a rollout carries its generation: 30 s, then 10 s; 20 s a step, not 10 and not 30."""
    stream, console = plain(20)
    for step in range(1, 4):
        rollout, update = divmod(step - 1, 2)
        console.step(record(step, rollout=rollout, update=update, seconds=10.0 if update else 30.0))
    assert stream.getvalue().splitlines()[-1].split()[-1] == "5m40s"  # 17 steps to go


def test_one_slow_step_does_not_move_the_time_left() -> None:
    stream, console = plain(100)
    for step in range(1, 12):
        console.step(record(step, seconds=1000.0 if step == 6 else 10.0))
    assert stream.getvalue().splitlines()[-1].split()[-1] == duration(89 * 10)


def test_what_went_wrong_is_said_once() -> None:
    stream, console = plain()
    console.step(record(1, skipped=1))
    console.step(record(2, failures=3, engine_restarts=1))
    console.step(record(3, engine_restarts=1))
    remarks = [line.strip() for line in stream.getvalue().splitlines() if "^" in line]
    assert remarks == [
        "^ the gradient was not finite, so the step was skipped",
        "^ a reward function failed for 3 completions; an engine died and was restarted",
    ]


def test_overclipping_is_marked_in_every_row_and_explained_once() -> None:
    stream, console = plain()
    for step, share in enumerate((0.49, 0.5, 1.0), 1):
        console.step(record(step, clip_fraction=share))
    text = stream.getvalue()
    assert [cell for cell in text.split() if cell in ("0.49", "0.50!", "1.00!")] == ["0.49", "0.50!", "1.00!"]
    assert text.count("most of this update is lost") == 1 and "50% of the ratios were clipped" in text


def test_plain_progress_is_sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: now[0])
    stream, console = plain()
    with console.rollout(3, 64) as bar:
        for _ in range(16):
            now[0] += 10.0
            bar.advance(4, 120)
    assert stream.getvalue().splitlines() == [
        "rollout 3: 24/64 completions, 12 tokens/s",
        "rollout 3: 48/64 completions, 12 tokens/s",
    ]


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_nothing_on_a_terminal_is_wider_than_it(width: int) -> None:
    def use(console: Console) -> None:
        assert console.width == width
        for step in range(1, 4):
            with console.rollout(step, 64) as bar:
                for _ in range(8):
                    bar.advance(8, 4000)
            console.step(record(step, seconds=86400.0, reward=-1234.5))

    text = ESCAPES.sub("", on_terminal(width, use))
    lines = [line for row in text.split("\n") for line in row.split("\r")]
    assert sum(len(line.rstrip()) > 0 for line in lines) >= 6
    assert max(map(len, lines)) <= width
    assert sum("-1" in line for line in lines) == 3  # every step has its row


def test_a_narrow_terminal_keeps_what_matters() -> None:
    def titles(width: int) -> list[str]:
        text = ESCAPES.sub("", on_terminal(width, lambda console: console.step(record(1))))
        return text.splitlines()[0].split()

    must = {"step", "reward", "length", "clip", "gap", "generate", "logprobs", "update", "sync", "tok/s", "left"}
    assert set(titles(80)) == must
    assert set(titles(120)) == {column.title for column in USUAL}
    assert titles(30) == ["step", "reward", "length", "left"]


def test_the_bar_moves_and_goes() -> None:
    def use(console: Console) -> None:
        with console.rollout(5, 64) as bar:
            bar.advance(16, 100)
            bar.progress.refresh()  # type: ignore[attr-defined]
            console.note("in between")
            bar.advance(48, 100)

    text = on_terminal(80, use)
    assert "rollout 5" in text and "16/64" in text and "64/64" in text and "in between" in text
    assert text.rstrip().endswith("\x1b[2K")  # the last thing is that its line is cleared


def test_the_cursor_is_never_hidden() -> None:
    def use(console: Console) -> None:
        with console.rollout(1, 8) as bar:
            bar.advance(8, 8)

    assert "\x1b[?25l" not in on_terminal(80, use)


def test_markup_and_escapes_of_others_stay_text() -> None:
    text = on_terminal(80, lambda console: console.note("[bold red]x[/] \x1b[2J \x1b]0;title\x07"))
    assert "[bold red]x[/]" in text
    assert "\x1b[2J" not in text and "\x1b]0" not in text and "\x07" not in text


@pytest.mark.parametrize("force", [True, False])
def test_a_terminal_that_went_away_costs_nothing(force: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    console = Console(stream, 60, plain=force)
    with console.rollout(1, 8) as bar:
        bar.advance(8, 8)
    console.step(record(1))
    console.warn("x")
    with pytest.raises(OSError):
        stream.close()
    closed = io.StringIO()
    closed.close()
    Console(closed, 60, plain=force).note("x")


def test_a_terminal_without_utf8() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Console(stream, 60, plain=True).note("é →")
    assert raw.getvalue() == b"? ?\n"


def test_a_dumb_terminal_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stream:
        assert Console(stream, 60).plain
    os.close(master)


def test_plain_mode_does_not_import_rich() -> None:
    code = (
        "import io, sys; from gspo_hpc.training.telemetry.console import Console\n"
        "c = Console(io.StringIO(), 9); c.note('x');"
        "bad = {'rich', 'torch', 'wandb'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (3599.6, "1h00m"),
        (7260, "2h01m"),
        (360000, "4d04h"),
        (86400 * 123, "123d"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_clean_keeps_letters_of_all_scripts() -> None:
    assert clean("שלום é 漢 a\tb") == "שלום é 漢 a    b"
    assert clean("a\x00b\u202ec\ud800d") == "a?b?c?d"


def test_what_is_shown_is_kept_without_colour_and_bars() -> None:
    kept = io.StringIO()

    def use(console: Console) -> None:
        console._kept = console_module.LenientStream(kept)
        console.header(["run demo"])
        with console.rollout(0, 8) as bar:
            bar.advance(8, 100)
        console.step(record(1, clip_fraction=0.75))
        console.warn("careful")

    shown = on_terminal(200, use)
    text = kept.getvalue()
    assert "\x1b[31m" in shown and "\x1b" not in text  # the bad cell is red
    lines = text.splitlines()
    assert lines[0] == "run demo" and "0.75!" in lines[2] and "75% of the ratios" in lines[3]
    assert lines[4] == "warning: careful" and len(lines) == 5


def test_an_update_without_signal_is_said_once_and_marked() -> None:
    stream, console = plain()
    for step in (1, 2):
        console.step(record(step, empty=1))
    console.step(record(3))
    text = stream.getvalue()
    assert text.count("nothing was learnt") == 1 and text.count("0.562!") == 2


def test_a_collapse_is_said_once() -> None:
    """Not of one update, whose few groups may happen to be sure; updates without any group count once it was low."""
    low = {"entropy": 0.01, "reward_std": 0.3}
    assert remarks([record(1), *(record(s, **(low if s % 4 == 0 else {})) for s in range(2, 20))]) == []
    rows = [record(1), record(2), record(3, **low), record(4, **low), record(5, **low)]
    assert remarks(rows) == ["4 ^ the entropy fell from 0.75 to 0.01 nats: the policy hardly explores any more"]
    equal = [record(s, entropy=None, empty=1, reward_std=0.0) for s in (4, 5, 6)]
    said = remarks([*rows[:3], *equal])
    assert said[0].endswith(
        "the entropy fell from 0.75 to 0.01 nats and all rewards are equal: the policy has collapsed, or the task is "
        "learned"
    )
    assert len(said) == 1 and said[0].startswith("4 ^ in every group of this update")
    assert not any("entropy" in one for one in remarks([record(1), record(2), *equal])), "it was never seen to be low"


def remarks(records: list[dict[str, Any]], **sections: dict[str, Any]) -> list[str]:
    """Return the remarks below the rows of a run with this config, each with the number of its row."""
    batch = {"global_batch_size": 64, "num_generations": 8, "steps_per_generation": 4}
    stream = io.StringIO()
    console = Console.of(loader.from_dict({"batch": batch} | sections), stream, None)
    said, rows = [], 0
    for one in records:
        before = len(stream.getvalue().splitlines())
        console.step(one)
        rows += 1
        said += [f"{rows} {line.strip()}" for line in stream.getvalue().splitlines()[before:] if "^" in line]
    return said


def test_a_clip_range_without_effect_is_said_once() -> None:
    def run(clipped: float, **algorithm: Any) -> list[str]:
        """Twenty updates, the last of which clips so much."""
        rows = [
            record(s, update=(s - 1) % 4, clip_fraction=clipped * (s == 20), ratio_deviation_max=1e-4 * ((s - 1) % 4))
            for s in range(1, 21)
        ]
        return remarks(rows, algorithm=algorithm)

    said = run(0.0)
    assert said == [
        "16 ^ no ratio was clipped in 12 updates: the largest |ratio - 1| was 0.0003, the range is -0.0003 to +0.0004, "
        "and has no effect"
    ], "of the first updates of rollouts none can be"
    assert run(0.2) == said, "a range that has an effect later is no reason to wait"
    assert run(0.0, name="sapo") == [], "a gate has no range"
    early = [record(s, update=s % 4, clip_fraction=0.1 * (s == 1), ratio_deviation_max=1e-4) for s in range(1, 40)]
    assert remarks(early) == []


def test_groups_that_teach_nothing_are_said_once() -> None:
    def run(*equal: int) -> list[str]:
        return remarks([record(s, zero_variance_groups=n) for s, n in enumerate(equal, 1)])

    assert run(1, 7, 3, 3, 2) == [], "one update alone says little"
    assert run(1, 5, 5, 5, 6, 6) == [
        "4 ^ in 50% of the groups of the last 4 updates all completions had the same reward, so they teach nothing"
    ]
    small = {"global_batch_size": 16, "num_generations": 8}
    assert remarks([record(s, zero_variance_groups=1) for s in range(1, 6)], batch=small)[0].startswith("4 ^ in 50% of")
    none = remarks([record(s, empty=True, zero_variance_groups=8) for s in range(1, 9)])
    assert len(none) == 1 and none[0].startswith("1 ^ in every group of this update"), "and no more of it"
    taught = {"teacher": "big", "kl_beta": 1.0}
    rows = [record(s, zero_variance_groups=8) for s in range(1, 9)]
    assert remarks(rows, algorithm=taught, reward={"functions": [{"function": "number_match", "weight": 0}]}) == []


def test_a_policy_that_runs_away_is_said_once() -> None:
    rows = [record(s, reference_kl=kl) for s, kl in enumerate((0.02, 0.9, 1.3, 1.5), 1)]
    assert remarks(rows, algorithm={"kl_beta": 0.001}) == [
        "3 ^ the policy is 1.3 nats a token from the reference model (0.02 at first): it runs away"
    ]
    rows = [record(s, reference_kl=kl) for s, kl in enumerate((3.0, 2.5, 2.9), 1)]
    assert remarks(rows, algorithm={"kl_beta": 0.001}) == [], "no farther than at first"
    rows = [record(s, approx_kl=kl) for s, kl in enumerate((0.0, 0.05, 0.06, 0.2), 1)]
    (said,) = remarks(rows)
    assert said.startswith("3 ^ this update was made 0.06 nats a token away from the policy that sampled")


def test_weights_that_leave_few_samples_are_said_once() -> None:
    shares = (1.0, 0.1, 0.6, 0.55, 0.31, 0.2)  # the second is one token's doing: the middle of four counts
    rows = [record(s, logprob_gap_effective=share) for s, share in enumerate(shares, 1)]
    assert remarks(rows) == [
        "5 ^ trainer and engine differ so much that the tokens of the last 4 updates count as 43% of them "
        "(logprob_gap_effective)"
    ]
    rows = [record(s, correction_fraction=share) for s, share in enumerate((0.1, 0.9, 0.3, 0.5, 0.7, 0.8), 1)]
    assert remarks(rows) == ["5 ^ the correction of the gap bounded or dropped 60% of the terms of the last 4 updates"]


@pytest.mark.parametrize("weight", [0, 1])
def test_a_run_with_a_teacher_shows_how_far_it_is_from_there(weight: int) -> None:
    """In place of the reward where that has no part in what is learnt; and once, that it moves away."""
    functions = [{"function": "number_match", "weight": weight}]
    algorithm = {"teacher": "big", "kl_beta": 0.5}
    config = loader.from_dict({"run": {"max_steps": 9}, "algorithm": algorithm, "reward": {"functions": functions}})
    stream = io.StringIO()
    console = Console.of(config, stream, None)
    for step, divergence in enumerate([0.185, 0.06, 0.38, 0.5], 1):
        console.step(record(step, reference_kl=divergence))
    header, first, _, third, said, fourth = stream.getvalue().splitlines()
    shown = ["step", *["reward"] * weight, "teacher", "length"]
    assert header.split()[: len(shown)] == shown and len(header) <= console.width
    assert [row.split()[len(shown) - 2] for row in (first, third, fourth)] == ["0.185", "0.38", "0.5"]
    assert "the divergence from the teacher was 0.185 at first: the policy moves away from it" in said


def test_a_run_without_a_teacher_has_no_column_for_one() -> None:
    config = loader.from_dict({"algorithm": {"kl_beta": 0.5}})
    stream = io.StringIO()
    console = Console.of(config, stream, None)
    for divergence in (0.1, 0.9):
        console.step(record(1, reference_kl=divergence))
    assert "teacher" not in stream.getvalue()


def test_every_column_is_explained() -> None:
    command = [sys.executable, "-m", "gspo_hpc", "logs", "--columns"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert [line.split()[0] for line in done.stdout.splitlines() if line[2:3].strip()] == [one.title for one in COLUMNS]
    alone = subprocess.run(command[:-1], capture_output=True, text=True, check=False, timeout=60)
    assert alone.returncode == 2 and "which run? gspo-hpc logs RUN" in alone.stderr


@pytest.mark.parametrize("value", [1e30, -1e30, 1.5e14, -123456.0, 0.0, float("nan")])
def test_a_huge_number_stays_in_its_column(value: float) -> None:
    """Cells that touch are read as one number."""
    stream, console = plain()
    console.step(record(1, reward=value, reward_std=value, response_length=value))
    titles, row = stream.getvalue().splitlines()[:2]
    assert len(row.split()) == len(titles.split()), row
