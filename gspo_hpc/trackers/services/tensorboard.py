"""TensorBoard as a tracker: an event file for each attempt in the folder tensorboard/ of the run. Needs no torch."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from gspo_hpc.system.terminal import program
from gspo_hpc.trackers.protocol import Record, Sent, encodable


class TensorBoard:
    """An event file. A step is one event, so a kill leaves the whole of it or nothing."""

    def __init__(self, log_dir: Path) -> None:
        self.place = f"TensorBoard: {program('tensorboard')} --logdir {shlex.quote(str(log_dir))}"
        self.sent = Sent(max(_steps(log_dir), default=-1))
        self._writer = EventFileWriter(str(log_dir))

    def log(self, records: Sequence[Record]) -> None:
        """Add one point to every curve for each record."""
        for record in records:
            values = [Summary.Value(tag=key, simple_value=value) for key, value in record.curves.items()]
            summary = Summary(value=[*values, *_texts(record)])
            self._writer.add_event(Event(wall_time=record.time, step=record.step, summary=summary))
        self._writer.flush()

    def close(self, exit_code: int) -> None:
        """Close the file."""
        self._writer.close()


def _steps(log_dir: Path) -> Iterator[int]:
    """Yield the steps that earlier attempts wrote."""
    for path in sorted(log_dir.glob("events.out.tfevents.*")):
        for raw in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(raw)
            if event.WhichOneof("what") == "summary":
                yield event.step


def _texts(record: Record) -> Iterator[Summary.Value]:
    """Yield the samples of each phase as one text: code blocks, which are shown and not interpreted."""
    phases = dict.fromkeys(str(row.get("phase", "")) for row in record.samples)
    for phase in phases:
        shown = [
            encodable(f"{row.get('prompt', '')}\n\n{row.get('completion', '')}")
            for row in record.samples
            if str(row.get("phase", "")) == phase
        ]
        blocks = ["".join(f"    {line}\n" for line in text.splitlines()) for text in shown]
        tensor = TensorProto(
            dtype="DT_STRING",
            string_val=["\n---\n\n".join(blocks).encode()],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        )
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        yield Summary.Value(tag=f"samples/{phase}/text_summary", metadata=metadata, tensor=tensor)
