"""What trackers have: their own stores read back, each by its library's reader or by its documented format."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7  # of the files of W&B and SwanLab: blocks of chunks with checksum, length and kind
Row = tuple[int, dict[str, float]]  # a step and its numbers


def chunks(path: Path, ident: bytes) -> Iterator[bytes]:
    """The records of such a file; a torn last one is left out. There is none where a kill came before its head."""
    data, at, whole = path.read_bytes(), HEADER, b""
    assert data[: len(ident)] == ident[: len(data)]
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        body = data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if len(body) < length or kind == 0:
            return
        whole = body if kind in (1, 2) else whole + body  # 1 whole, 2 first, 3 middle, 4 last
        if kind in (1, 4):
            yield whole


def wandb_history(run: Path, run_id: str) -> list[dict[str, Any]]:
    """All rows in the offline files of a W&B run, in the order of the files."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # made at import

    rows = []
    for path in sorted(run.glob(f"wandb/offline-run-*/run-{run_id}.wandb")):
        for chunk in chunks(path, b":W&B"):
            record = Record.FromString(chunk)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in items})
    return rows


def wandb(run: Path, run_id: str) -> list[Row]:
    """The rows of W&B without what it adds."""
    return [
        (row["_step"], {key: value for key, value in row.items() if key[0] != "_" and not key.startswith("samples")})
        for row in wandb_history(run, run_id)
    ]


def tensorboard(run: Path, run_id: str) -> list[Row]:
    """The points of all curves, as TensorBoard itself reads them."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={SCALARS: 0})
    events.Reload()
    points = [(one.step, key, one.value) for key in events.Tags()["scalars"] for one in events.Scalars(key)]
    return by_step(points)


def mlflow(run: Path, run_id: str) -> list[Row]:
    """The history of all metrics of the only run with this id."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run / 'mlflow.db'}")
    (found,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    assert found.data.tags["gspo_hpc.run_id"] == run_id
    keys = found.data.metrics
    points = [(one.step, key, one.value) for key in keys for one in client.get_metric_history(found.info.run_id, key)]
    rows = by_step(points)
    assert all(values.pop("step") == step for step, values in rows)
    return rows


def trackio(run: Path, run_id: str) -> list[Row]:
    """The rows of the database of project gspo_hpc."""
    with sqlite3.connect(run / "trackio" / "gspo_hpc.db") as database:
        assert database.execute("SELECT DISTINCT run_id FROM metrics").fetchall() == [(run_id,)]
        return [(step, json.loads(text)) for step, text in database.execute("SELECT step, metrics FROM metrics")]


def swanlab(run: Path, run_id: str) -> list[Row]:
    """All numbers in the offline files."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    points = []
    for path in sorted(run.glob(f"swanlab/run-*/run-{run_id}.swanlab")):
        for chunk in chunks(path, b":SWL"):
            record = Record.FromString(chunk)
            if record.WhichOneof("record_type") == "scalar":
                points.append((record.scalar.step, record.scalar.key, record.scalar.value.number))
    return by_step(points)


def by_step(points: list[tuple[int, str, float]]) -> list[Row]:
    """Points as rows; a point that is there twice makes a row of its own."""
    rows: list[Row] = []
    for step, key, value in points:
        row = next((values for at, values in rows if at == step and key not in values), None)
        if row is None:
            rows.append((step, row := {}))
        row[key] = value
    return rows


READERS = {"W&B": wandb, "TensorBoard": tensorboard, "MLflow": mlflow, "Trackio": trackio, "SwanLab": swanlab}
