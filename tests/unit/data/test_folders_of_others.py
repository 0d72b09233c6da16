"""Folders and files of data of another's making: what leads out of them is not read, and what is malformed is named.

Takes 5 s. It would catch a link through which any file of this machine is read as data, a link of the hub's cache that
is refused, and a traceback where a file is not what its name says.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config.schema import Data
from gspo_hpc.data.rows import load_rows
from tests.unit.data.test_files import CONFIGS, repository, saved

ROW = '{"prompt": "secret"}\n'


def lead_out(path: Path, target: Path) -> None:
    """Put a link in the place of a file or folder."""
    target.parent.mkdir(parents=True, exist_ok=True)
    path.rename(target)
    path.symlink_to(target)


def saved_file(folder: Path) -> Path:
    return saved(folder) / "data-00000-of-00002.arrow"


def saved_state(folder: Path) -> Path:
    return saved(folder) / "state.json"


def saved_split(folder: Path) -> Path:
    saved(folder / "train")
    (folder / "dataset_dict.json").write_text('{"splits": ["train"]}')
    return folder / "train"


def named_by_pattern(folder: Path) -> Path:
    return (
        repository(folder, CONFIGS.replace("main/train-*", "main/train-*.jsonl"))
        / "main"
        / "train-00001-of-00002.jsonl"
    )


def folder_of_pattern(folder: Path) -> Path:
    return repository(folder, CONFIGS) / "main"


def readme(folder: Path) -> Path:
    return repository(folder, CONFIGS) / "README.md"


def named_by_itself(folder: Path) -> Path:
    return repository(folder) / "main" / "train-00000-of-00002.jsonl"


def folder_by_itself(folder: Path) -> Path:
    return repository(folder) / "main"


MADE: list[Callable[[Path], Path]] = [
    *(saved_file, saved_state, saved_split),
    *(named_by_pattern, folder_of_pattern, readme, named_by_itself, folder_by_itself),
]


def text_of(folder: Path, made: Callable[[Path], Path]) -> str:
    return str(folder) if made.__name__.startswith("saved") else f"{folder}:main/train"


@pytest.mark.parametrize("made", MADE, ids=lambda one: one.__name__)
def test_a_link_out_of_the_folder_is_refused_with_what_to_do(
    made: Callable[[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inside = made(tmp_path / "data")
    outside = tmp_path / "elsewhere" / inside.name
    assert load_rows(text_of(tmp_path / "data", made), Data())
    lead_out(inside, outside)
    with pytest.raises(ValueError, match="put a copy in its place, or name that as data") as caught:
        load_rows(text_of(tmp_path / "data", made), Data())
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{inside} leads out of {tmp_path / 'data'}, to {outside}") or str(outside) in line
    assert main(["train", "tiny_cpu", f"data.train={text_of(tmp_path / 'data', made)}", "data.eval=null"]) == 2
    assert "leads out of" in capsys.readouterr().err


@pytest.mark.parametrize("made", MADE, ids=lambda one: one.__name__)
def test_links_within_the_folder_and_the_folder_itself_may_be_links(
    made: Callable[[Path], Path], tmp_path: Path
) -> None:
    inside = made(tmp_path / "data")
    before = load_rows(text_of(tmp_path / "data", made), Data())
    (tmp_path / "link").symlink_to(tmp_path / "data")
    lead_out(inside, tmp_path / "data" / ".kept" / inside.name)
    for folder in (tmp_path / "data", tmp_path / "link"):
        found = load_rows(text_of(folder, made), Data())
        assert [row.prompt for row in found] == [row.prompt for row in before]


def cached(home: Path, source: Path) -> Path:
    """The layout of the hub's cache: files of a snapshot are links to the blobs of the repository."""
    snapshot = home / "snapshots" / "0123abc"
    (home / "blobs").mkdir(parents=True)
    for number, path in enumerate(sorted(source.rglob("*"))):
        if path.is_file():
            link = snapshot / path.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            (home / "blobs" / f"{number:040x}").write_bytes(path.read_bytes())
            link.symlink_to(os.path.relpath(home / "blobs" / f"{number:040x}", link.parent))
    return snapshot


@pytest.mark.parametrize("text", [CONFIGS, None])
def test_blobs_of_the_same_repository_are_read_and_others_are_not(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = cached(tmp_path / "datasets--acme--gsm", repository(tmp_path / "source", text))
    (tmp_path / "named").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "named"):
        assert len(load_rows(f"{folder}:main/train", Data())) == 2
    blobs = tmp_path / "datasets--acme--gsm" / "blobs"
    blobs.rename(tmp_path / "larger")  # a disk with more room
    blobs.symlink_to(tmp_path / "larger")
    with pytest.raises(ValueError, match="leads out of"):  # of another's making, it would lead anywhere
        load_rows(f"{snapshot}:main/train", Data())
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))  # the user's own cache
    assert len(load_rows(f"{snapshot}:main/train", Data())) == 2
    monkeypatch.delenv("HF_HUB_CACHE")
    blobs.unlink()
    blobs.symlink_to(blobs)
    with pytest.raises(ValueError, match=r"leads out of|cannot be read|no data files"):
        load_rows(f"{snapshot}:main/train", Data())
    blobs.unlink()
    (tmp_path / "larger").rename(blobs)
    other = tmp_path / "datasets--acme--other" / "blobs" / "1"
    other.parent.mkdir(parents=True)
    other.write_text(ROW)
    for target in (other, tmp_path / "datasets--acme--gsm" / "blobs" / ".." / ".." / "named.jsonl"):
        target.write_text(ROW)
        link = snapshot / "main" / "train-00000-of-00002.jsonl"
        link.unlink()
        link.symlink_to(target)
        with pytest.raises(ValueError, match="leads out of"):
            load_rows(f"{snapshot}:main/train", Data())


DEEP = "[" * 3000 + "]" * 3000
PICKLE = b"\x80\x02cposix\nsystem\n."
FEATURES = [
    '{"info": []}',
    '{"info": {"features": []}}',
    '{"info": null}',
    "[]",
    '{"info": {"features": {"prompt": 1}}}',
]


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
@pytest.mark.parametrize("features", [*FEATURES, DEEP, "{", "NaN", PICKLE], ids=range(len(FEATURES) + 4))
def test_metadata_of_another_form_is_no_traceback(
    features: str | bytes, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"a.{kind}"
    table = pyarrow.table({"prompt": ["a"] * 99, "answer": ["1"] * 99}).replace_schema_metadata(
        {"huggingface": features}
    )
    if kind == "arrow":
        with pyarrow.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    else:
        pyarrow.parquet.write_table(table, path)
    if features in FEATURES:  # JSON that says nothing of images
        assert len(load_rows(path, Data())) == 99
        return
    with pytest.raises(ValueError, match="its metadata 'huggingface' cannot be read") as caught:
        load_rows(path, Data())
    assert str(caught.value).startswith(str(path)) and len(str(caught.value).splitlines()) == 1
    assert main(["train", "tiny_cpu", f"data.train={path}", "data.eval=null"]) == 2
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize("at", ["name", "value"])
def test_text_of_an_arrow_file_that_is_no_utf8_is_named(at: str, tmp_path: Path) -> None:
    """Arrow does not look at the bytes of a text, nor at those of a column's name."""
    path = tmp_path / "a.arrow"
    table = pyarrow.table({"prompt": ["abcdefgh"], "zzzzzzzz": ["1"]})
    with pyarrow.ipc.new_file(path, table.schema) as file:
        file.write_table(table)
    wanted = b"zzzzzzzz" if at == "name" else b"abcdefgh"
    path.write_bytes(path.read_bytes().replace(wanted, b"\xff" * 8))
    with pytest.raises(ValueError, match="cannot be read as arrow") as caught:
        load_rows(path, Data())
    assert str(path) in str(caught.value)


STATES = [
    *("null", "[]", "{", "{}", DEEP, '{"_data_files": [{"filename": Infinity}]}'),
    *(json.dumps({"_data_files": one}) for one in (None, "a.arrow", ["a.arrow"], [{}], 3, [{"filename": 1}])),
]
SPLITS = ["7", "{}", DEEP, '{"splits": null}', '{"splits": "train"}', '{"splits": [1]}']


@pytest.mark.parametrize(
    ("name", "content"),
    [*(("state.json", text) for text in STATES), *(("dataset_dict.json", text) for text in SPLITS)],
    ids=lambda text: text[:40],
)
def test_what_names_the_files_of_a_saved_folder_is_named_where_it_is_malformed(
    name: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=name) as caught:
        load_rows(tmp_path, Data())
    assert len(str(caught.value).splitlines()) == 1
    assert main(["train", "tiny_cpu", f"data.train={tmp_path}", "data.eval=null"]) == 2
    assert str(tmp_path / name) in capsys.readouterr().err


@pytest.mark.parametrize("pattern", ["'.'", "''", "'**a'", "'a/**b/*'", f"'{'a/' * 3000}b'", "'./.'", "'\\0'"])
def test_what_is_no_pattern_is_refused_with_the_readme(pattern: str, tmp_path: Path) -> None:
    folder = repository(tmp_path, f"configs:\n- data_files: {pattern}\n")
    with pytest.raises(ValueError, match=r"README\.md"):
        load_rows(folder, Data())


@pytest.mark.parametrize("configs", ["5", "true", "{a: b}", "text", "[[]]"])
def test_configs_of_another_form_name_no_files(configs: str, tmp_path: Path) -> None:
    """The names of the files tell then, as where README.md has none."""
    folder = repository(tmp_path, f"configs: {configs}\n")
    assert len(load_rows(f"{folder}:main/train", Data())) == 2


def test_rows_that_are_nested_too_deeply_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{ROW}{{"prompt": "a", "answer": {DEEP}}}\n{ROW}')
    with pytest.raises(ValueError, match="1 of 3 rows cannot be used") as caught:
        load_rows(path, Data())
    assert f"{path}:2: not JSON that can be read: it is nested too deeply" in str(caught.value)


def test_a_link_of_another_split_is_not_looked_at(tmp_path: Path) -> None:
    folder = repository(tmp_path / "data", None)
    outside = tmp_path / "outside.jsonl"
    outside.write_text(ROW)
    (folder / "main" / "test-00000-of-00001.jsonl").unlink(missing_ok=True)
    (folder / "main" / "test-00000-of-00001.jsonl").symlink_to(outside)
    assert len(load_rows(f"{folder}:main/train", Data())) == 2
    with pytest.raises(ValueError, match="leads out of"):
        load_rows(f"{folder}:main/test", Data())
