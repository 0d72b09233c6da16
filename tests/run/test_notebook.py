"""docs/notebook.ipynb runs from its first cell to its last, in a kernel of its own, and is committed without outputs.

Takes 72 s on two busy cores: one run of eight steps. It would catch a cell that fails, and a function of the Python
interface that does not do in a notebook what the text says: train, read, register a reward function, an observer and an
algorithm.
"""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests.run import harness

SECONDS = 240  # that a cell may take


def read(project: Path) -> NotebookNode:
    """The notebook, which is valid by its own format."""
    notebook = nbformat.read(project / "docs" / "notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    return notebook


def test_it_is_committed_without_outputs(project: Path) -> None:
    cells = [cell for cell in read(project).cells if cell.cell_type == "code"]
    assert len(cells) > 10
    assert [cell.source for cell in cells if cell.outputs or cell.execution_count] == []


def text_of(cell: NotebookNode) -> str:
    """What a cell has printed and returned."""
    parts = [one.get("text") or one.get("data", {}).get("text/plain", "") for one in cell.outputs]
    return "".join(parts)


def test_all_cells_run(project: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "tiny").symlink_to(tiny_folder)
    for name, value in harness.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(project))
    notebook = read(project)
    client = NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    shown = {cell.source.splitlines()[0]: text_of(cell) for cell in notebook.cells if cell.cell_type == "code"}
    assert "nearest: batch.num_generations" in shown["try:"]
    assert "valid: True" in shown["found = gspo_hpc.plan(config)"]
    assert (
        "clip_high=0.008"
        in shown['config = gspo_hpc.with_algorithm(config, "wider.py:Wider", normalize_advantage=False)']
    )
    assert "done, step 8 of 8" in shown["run = gspo_hpc.train(config)"]

    records = [record for record in harness.metrics(tmp_path / "runs" / "notebook") if "reward" in record]
    assert [record["step"] for record in records] == list(range(1, 9))
    assert all("reward/rewards.py:near" in record for record in records)
    assert "wider.py:Wider trains" in (tmp_path / "runs" / "notebook" / "attempts" / "0001" / "console.log").read_text()
    lines = shown['run = gspo_hpc.open_run("runs/notebook")'].splitlines()
    assert [line.split("#")[0].split() for line in lines] == [
        ["step", str(record["step"]), "reward", f"{record['reward']:.3f}"] for record in records
    ]
    seen = [line.split() for line in shown['print((run.path / "rewards.txt").read_text())'].split("\n") if line]
    assert seen[-8:] == [[str(record["step"]), str(record["reward"])] for record in records]
    assert "<svg" in (tmp_path / "notebook.html").read_text()
