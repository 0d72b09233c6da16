"""Prometheus as a tracker: a file of gauges for the textfile collector of node_exporter.

No listener is opened: node_exporter, which clusters run anyway, reads the file from the folder that its administrator
names (https://github.com/prometheus/node_exporter#textfile-collector). docs/grafana.json is a dashboard for it.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from gspo_hpc.trackers.protocol import Record, Sent, encodable

PREFIX = "gspo_hpc_"
_READABLE = 0o644  # node_exporter is another user; the file has numbers and the run's name, no texts


class Prometheus:
    """The file of one run, replaced with every step. It stays when the run ends, with `gspo_hpc_running` 0."""

    sent = Sent()  # the file has the newest step only, so none is repeated

    def __init__(self, folder: str, run_name: str, run_id: str) -> None:
        if not Path(folder).is_dir():
            raise ValueError(f"tracking.prometheus: there is no folder {folder}")
        self._labels = {"run": run_name, "id": run_id}
        self._path = Path(folder) / f"gspo_hpc_{run_id}.prom"
        self._values: dict[str, float] = {}
        self.place = f"Prometheus: {self._path}"

    def log(self, records: Sequence[Record]) -> None:
        """Replace the file by one with the numbers of the newest step."""
        self._values = dict(records[-1].values)
        self._write(running=1)

    def close(self, exit_code: int) -> None:
        """Say that the run no longer goes on, and with which exit code it ended."""
        self._values["exit_code"] = exit_code
        self._write(running=0)

    def _write(self, running: int) -> None:
        values = self._values | {"running": running, "time": time.time()}
        new = self._path.with_suffix(".new")  # the collector reads only *.prom
        new.write_text(exposition(values, self._labels), encoding="utf-8")
        os.chmod(new, _READABLE)
        os.replace(new, self._path)


def exposition(values: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """Return numbers as gauges in Prometheus's text format.

    ``seconds/update`` becomes ``gspo_hpc_seconds{name="update"}``: what stands before the slash is the metric.
    """
    lines: dict[str, list[str]] = defaultdict(list)
    for key, value in values.items():
        metric, _, name = key.partition("/")
        own = {**labels, **({"name": name} if name else {})}
        shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in own.items())
        metric = PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", metric)
        lines[metric].append(f"{metric}{{{shown}}} {_number(value)}")
    return "".join(f"# TYPE {metric} gauge\n" + "\n".join(found) + "\n" for metric, found in lines.items())


def _escaped(text: str) -> str:
    return encodable(text).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(value) if math.isfinite(value) else "+Inf" if value > 0 else "-Inf"
