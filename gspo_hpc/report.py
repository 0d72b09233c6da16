"""The report of a run: one self-contained HTML page of curves, samples, plan, settings and attempts.

Floor 6. The page needs no network, no server and no script. Whatever a model wrote is escaped; in addition the page's
own policy allows no other script than the one it came with.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gspo_hpc.console import duration
from gspo_hpc.durable import write_atomically
from gspo_hpc.report_charts import chart_section
from gspo_hpc.report_data import AttemptView, RunData, read_run, unix_time, value
from gspo_hpc.report_samples import escape, sample_section
from gspo_hpc.report_style import CSS, SCRIPT
from gspo_hpc.scales import number

STATES = {
    "done": "done",
    "running": "running",
    "stopped": "stopped, can go on",
    "preempted": "preempted, goes on by itself",
    "time limit": "out of time, goes on by itself",
    "cancelled": "cancelled, can go on",
    "failed": "failed",
    "killed": "killed, can go on",
    "refused": "refused to start",
    "new": "not started",
}


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the page, by default as report.html of the run, and return its path.

    Works on a run in any state. Raises ValueError if `run_dir` is no run directory, OSError if the page cannot be
    written; an old page is then left as it was.
    """
    run = read_run(Path(run_dir))
    path = Path(out) if out is not None else run.path / "report.html"
    if path.is_dir():
        raise ValueError(f"{path}: is a directory; give the name of the page, --out {path / 'report.html'}")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no directory {path.parent}")
    write_atomically(path, page(run))
    return path


def page(run: RunData) -> str:
    """The whole page as text that UTF-8 can hold."""
    charts, data = chart_section(run)
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    values = json.dumps(data, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(run.name)} – {escape(STATES.get(run.state, run.state))}</title>"
        f"<style>{CSS}</style></head><body><main>"
        f"{_head(run)}{charts}{sample_section(run)}{_attempts(run)}{_plan(run)}{_settings(run)}{_foot(run)}"
        f'</main><script type="application/json" id="data">{values}</script><script>{SCRIPT}</script></body></html>\n'
    )


def _head(run: RunData) -> str:
    words = []
    if run.config is not None:
        config = run.config
        ranks = f"{config.world_size} rank{'s' if config.world_size != 1 else ''} ({config.cluster.platform})"
        model = Path(config.model.path).name if config.model.path else None
        words = [word for word in (config.algorithm.name.upper(), model, config.model.dtype, ranks) if word]
    begun = unix_time(run.info.get("created")) or next((one.started for one in run.attempts if one.started), None)
    if begun is not None:
        words.append(f"begun {_when(begun)}")
    facts = [_accuracy(run), _reward(run), _steps(run), _time(run), _speed(run)]
    return (
        f'<header><div class="top"><h1>{escape(run.name)}</h1>'
        f'<span class="state {escape(run.state)}">{escape(STATES.get(run.state, run.state))}</span></div>'
        f'<p class="sub">{" · ".join(map(escape, words))}</p></header>'
        f'<dl class="facts">{"".join(fact for fact in facts if fact)}</dl>'
    )


def _fact(name: str, what: str, more: str = "") -> str:
    return f"<div><dt>{name}</dt><dd>{what}</dd><p>{more}</p></div>"


def _change(before: float, after: float, digits: int) -> str:
    difference = after - before
    kind = "up" if difference > 0 else "down" if difference < 0 else ""
    return f'<span class="{kind}">{difference:+.{digits}f}</span>'.replace("-", "−")


def _accuracy(run: RunData) -> str:
    if not run.accuracy:
        return ""
    (_, first), (step, last) = run.accuracy[0], run.accuracy[-1]
    if len(run.accuracy) == 1:
        return _fact("Accuracy", f"{last:.3f}", f"unseen prompts, step {step}")
    what = f'<span class="was">{first:.3f} →</span> {last:.3f}'
    return _fact("Accuracy", what, f"{_change(first, last, 3)} on unseen prompts")


def _reward(run: RunData) -> str:
    rewards = [reward for record in run.train_records if (reward := value(record, "reward")) is not None]
    if not rewards:
        return ""
    tenth = max(1, len(rewards) // 10)
    first, last = sum(rewards[:tenth]) / tenth, sum(rewards[-tenth:]) / tenth
    if len(rewards) == 1:
        return _fact("Reward", number(last), "its only step")
    what = f'<span class="was">{number(first)} →</span> {number(last)}'
    many = f"first and last {tenth} steps" if tenth > 1 else "first and last step"
    return _fact("Reward", what, many)


def _steps(run: RunData) -> str:
    of = f" <small>of {run.max_steps:,}</small>" if run.max_steps else ""
    completions = run.config.batch.global_batch_size if run.config is not None else None
    return _fact("Steps", f"{run.steps:,}{of}", f"{completions:,} completions each" if completions else "")


def _time(run: RunData) -> str:
    count = len(run.attempts)
    return _fact("Time", duration(run.seconds), f"in {count} attempts" if count > 1 else "")


def _speed(run: RunData) -> str:
    if run.tokens_per_s is None:
        return ""
    tokens = max((value(record, "tokens") or 0.0 for record in run.records), default=0.0)
    more = f"{number(tokens)} sampled in all" if tokens else ""
    return _fact("Completion tokens", f"{number(run.tokens_per_s)} <small>per second</small>", more)


def _attempts(run: RunData) -> str:
    if not run.attempts:
        return ""
    starts = [one.started for one in run.attempts if one.started is not None]
    ends = [time for one in run.attempts for time in (one.started, one.ended) if time is not None]
    begin, length = min(starts, default=0.0), max(max(ends, default=1.0) - min(starts, default=0.0), 1e-9)
    rows = "".join(_attempt(one, begin, length) for one in run.attempts)
    return (
        '<h2>Attempts</h2><p class="lead">Each start of the run, on one clock, and why it ended.</p><table><thead><tr>'
        '<th>#</th><th class="span"></th><th>Started</th><th>Took</th><th>Steps</th><th>Where</th><th>Why it ended</th>'
        f"</tr></thead><tbody>{rows}</tbody></table>"
    )


def _attempt(one: AttemptView, begin: float, length: float) -> str:
    track = ""
    if one.started is not None:
        left, wide = (one.started - begin) / length, (one.seconds or 0.0) / length
        place = f"left:min({left:.2%},100% - 3px);width:{wide:.2%}"
        track = f'<div class="track"><i class="{escape(one.reason.replace(" ", "-"))}" style="{place}"></i></div>'
    steps = "–" if one.steps is None else f"{one.steps[0]}–{one.steps[1]}"
    why = escape(one.reason) + (f": {escape(one.detail[:500])}" if one.detail else "")
    return (
        f'<tr><td class="num">{one.number}</td><td class="span">{track}</td>'
        f'<td class="num">{_when(one.started) if one.started is not None else "–"}</td>'
        f'<td class="num">{duration(one.seconds) if one.seconds is not None else "–"}</td>'
        f'<td class="num">{steps}</td><td>{escape(one.where)}</td><td class="why">{why}</td></tr>'
    )


def _plan(run: RunData) -> str:
    groups = [
        _group(title, [(key, inner, False) for key, inner in run.plan[key_].items()])
        for title, key_ in (("Batch", "quantities"), ("Layout", "layout"))
        if isinstance(run.plan.get(key_), Mapping)
    ]
    passes = run.plan.get("passes")
    if isinstance(passes, Mapping):
        rows = [(name, _pass(one), False) for name, one in passes.items() if isinstance(one, Mapping)]
        groups.append(_group("Passes over the model", rows))
    if not groups:
        return ""
    remarks = [text for key in ("warnings", "notes") for text in run.plan.get(key) or [] if isinstance(text, str)]
    below = "".join(f'<p class="lead">{escape(text)}</p>' for text in remarks)
    lead = '<p class="lead">Batch sizes count completions.</p>'
    return f'<h2>Plan</h2>{lead}<div class="grids">{"".join(groups)}</div>{below}'


def _pass(one: Mapping[str, Any]) -> str:
    if not one.get("needed"):
        return "not needed"
    for key, unit in (("micro_batch_size", "completions"), ("micro_batch_tokens", "tokens")):
        if one.get(key):
            return f"{one[key]} {unit} a micro-batch"
    return "needed"


def _settings(run: RunData) -> str:
    groups = "".join(_group(section, rows) for section, rows in run.settings().items())
    if not groups:
        return ""
    changed = sum(not default for rows in run.settings().values() for _, _, default in rows)
    return (
        '<h2>Configuration</h2><p class="lead">As this run resolved it; grey is the default.</p>'
        f"<details><summary>{changed} settings of its own, and all others</summary>"
        f'<div class="grids">{groups}</div></details>'
    )


def _group(title: str, rows: list[tuple[str, Any, bool]]) -> str:
    lines = "".join(
        f'<div class="row{" default" if default else ""}"><dt>{escape(key)}</dt><dd>{escape(_shown(inner))}</dd></div>'
        for key, inner, default in rows
    )
    return f"<dl><h3>{escape(title)}</h3>{lines}</dl>"


def _shown(inner: Any) -> str:
    if inner is None:
        return "–"
    if isinstance(inner, bool):
        return "yes" if inner else "no"
    if isinstance(inner, int) and abs(inner) >= 10000:
        return f"{inner:,}"
    if isinstance(inner, (dict, list, tuple)):
        return json.dumps(inner, ensure_ascii=False, default=str)[:2000] if inner else "–"
    return str(inner)[:2000]


def _foot(run: RunData) -> str:
    words = [f"run {run.info['run_id']}"] if run.info.get("run_id") else []
    versions = run.info.get("versions")
    if isinstance(versions, Mapping):
        words += [f"{name} {version}" for name, version in versions.items()]
    words.append(f"page written {_when(datetime.now(UTC).timestamp())}")
    return f"<footer>{' · '.join(map(escape, words))}</footer>"


def _when(time: float) -> str:
    return f"{datetime.fromtimestamp(time, UTC):%-d %b %Y %H:%M} UTC"
