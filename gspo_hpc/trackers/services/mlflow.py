"""MLflow as a tracker: the server that MLFLOW_TRACKING_URI names, or a database in the run directory.

Samples are not sent: they are artifacts to MLflow, whose place a server decides. They are in samples.jsonl.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import mlflow
from mlflow.entities import Metric, Param, RunStatus

from gspo_hpc.system.exit_codes import DONE, REQUEUE
from gspo_hpc.trackers.protocol import Record, Sent, TrackedRun

_TAG = "gspo_hpc.run_id"  # by which an attempt finds the run of the attempts before it
_METRICS, _PARAMS, _LONGEST = 1000, 100, 500  # the most that MLflow takes at once, and of the text of a parameter
_NAME = 250  # characters of a name, at the most
_STATUS = {DONE: RunStatus.FINISHED, REQUEUE: RunStatus.SCHEDULED}


class Mlflow:
    """A run of an experiment. A step is one request, taken as a whole or not; its metric `step` tells which."""

    def __init__(self, experiment: str, run: TrackedRun) -> None:
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it tells how it makes its tables
        logging.getLogger("alembic").setLevel(logging.WARNING)
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.path / 'mlflow.db'}"
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(experiment)
        number = found.experiment_id if found is not None else self._client.create_experiment(experiment)
        known = self._client.search_runs([number], filter_string=f"tags.`{_TAG}` = '{run.id}'", max_results=1)
        if known:
            self._id = known[0].info.run_id
            self._client.update_run(self._id, status=RunStatus.to_string(RunStatus.RUNNING))
        else:
            self._id = self._client.create_run(number, run_name=run.name, tags={_TAG: run.id}).info.run_id
            given = Names()
            params = [Param(given.of(key), str(value)[:_LONGEST]) for key, value in _flat("", run.config)]
            for at in range(0, len(params), _PARAMS):
                self._client.log_batch(self._id, params=params[at : at + _PARAMS])
        self._names = Names()
        metrics = known[0].data.metrics if known else {}
        self.sent = Sent(int(metrics.get("step", -1)))
        self.place = f"MLflow: experiment {experiment} at {_shown(uri)}"

    def log(self, records: Sequence[Record]) -> None:
        """Log records, as many of them at once as MLflow takes."""
        batch: list[Metric] = []
        for record in records:
            at = int(record.time * 1000)
            values = [*record.curves.items(), ("step", record.step)]
            new = [Metric(self._names.of(key), value, at, record.step) for key, value in values]
            if len(batch) + len(new) > _METRICS:
                self._client.log_batch(self._id, metrics=batch)
                batch = []
            batch += new
        self._client.log_batch(self._id, metrics=batch)

    def close(self, exit_code: int) -> None:
        """Say how the run ended; one that goes on later is waiting until then."""
        status = RunStatus.to_string(_STATUS.get(exit_code, RunStatus.FAILED))
        self._client.set_terminated(self._id, status=status)


class Names:
    """The names by which MLflow takes ours, which hold paths of reward functions and keys of the user's own.

    To MLflow a name is a path below a folder of its own: without empty parts, without . and .., and of few characters.
    """

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def of(self, key: str) -> str:
        """Return the name for a key: the same one at every call, and another one for every other key."""
        if key not in self._known:
            parts = (re.sub(r"[^\w.\- :]", "_", part) for part in key.split("/") if part not in ("", "."))
            name = "/".join("_" if part == ".." else part for part in parts) or "_"
            if len(name) > _NAME or name in self._known.values():
                end = f"_{hashlib.sha256(key.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"
                name = name[: _NAME - len(end)].rstrip("/") + end
            self._known[key] = name
        return self._known[key]


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the settings with dotted keys."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)
    else:
        yield prefix, value


def _shown(uri: str) -> str:
    """Return the address of a store without what may be a password."""
    parts = urlsplit(uri)
    return uri if parts.username is None else parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
