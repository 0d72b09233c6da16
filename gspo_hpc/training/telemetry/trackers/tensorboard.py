"""TensorBoard as a tracker: an event file in the folder tensorboard/ of the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo_hpc.training.telemetry.trackers.sink import Samples, encodable


class TensorBoard:
    """An event file. Steps after `last` that an attempt wrote before it was killed are hidden by TensorBoard."""

    def __init__(self, log_dir: Path, last: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if last is None else last + 1
        self.place = f"TensorBoard: tensorboard --logdir {log_dir}"
        self.writer: Any = SummaryWriter(str(log_dir), purge_step=purge)

    def log(self, step: int, values: Mapping[str, float], samples: Samples) -> None:
        """Add one point to every curve."""
        for key, value in values.items():
            if key not in ("step", "time"):
                self.writer.add_scalar(key, value, step)
        for row in samples:
            text = encodable(f"{row.get('prompt', '')}\n\n{row.get('completion', '')}")
            indented = "".join(f"    {line}\n" for line in text.splitlines())  # a code block: shown, not interpreted
            self.writer.add_text(f"samples/{row.get('phase', '')}", indented, step)
        self.writer.flush()

    def close(self, samples: Samples, exit_code: int) -> None:
        """Close the file."""
        self.writer.close()
