"""Files and folders of data: every form gives the same rows, and what is no text or no such split is refused by name.

Takes 5 s. It would catch a form that loses rows, values or their places, a split that is taken for another, and columns
of images that train as if they were not there.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Data
from gspo_hpc.data import counting, hub_data
from gspo_hpc.data.rows import first_rows, load_rows
from tests.hub_server import Hub, serving
from tests.unit.data.test_hub_data import fetched

ROWS = [{"prompt": f'{number},\n"{number}"', "answer": str(number), "kind": "é"} for number in range(30)]
Writer = Callable[[Path], Path]


def jsonl(folder: Path) -> Path:
    path = folder / "a.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    return path


def table(folder: Path, name: str = "a.csv", delimiter: str = ",") -> Path:
    with (folder / name).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*ROWS[0]], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)
    return folder / name


def compressed(folder: Path, written: Path, ending: str) -> Path:
    path = folder / f"{written.name}{ending}"
    if ending == ".gz":
        path.write_bytes(gzip.compress(written.read_bytes()))
    else:
        with pyarrow.CompressedOutputStream(str(path), "zstd") as stream:
            stream.write(written.read_bytes())
    return path


def parquet(folder: Path) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "a.parquet", row_group_size=7)
    return folder / "a.parquet"


def saved(folder: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    """Write what `Dataset.save_to_disk` writes: a stream of Arrow in two files, and a state that names them."""
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for part in range(2):
        some = pyarrow.Table.from_pylist(rows[part * 20 : (part + 1) * 20] or rows[:0])
        names.append(f"data-{part:05d}-of-00002.arrow")
        with pyarrow.ipc.new_stream(folder / names[-1], some.schema) as stream:
            stream.write_table(some, max_chunksize=6)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return folder


FORMS: dict[str, Writer] = {
    "jsonl": jsonl,
    "csv": table,
    "tsv": lambda folder: table(folder, "a.tsv", "\t"),
    "jsonl.gz": lambda folder: compressed(folder, jsonl(folder), ".gz"),
    "csv.zst": lambda folder: compressed(folder, table(folder), ".zst"),
    "parquet": parquet,
    "save_to_disk": lambda folder: saved(folder / "saved"),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_rows(tmp_path: Path, form: str) -> None:
    path = FORMS[form](tmp_path)
    rows = load_rows(path, Data())
    assert [{"prompt": row.prompt, **row.fields} for row in rows] == ROWS
    assert [row.index for row in rows] == [*range(len(ROWS))] and len({row.where for row in rows}) == len(ROWS)
    assert counting.count_rows(path) == len(ROWS) and counting.fields(path) == tuple(ROWS[0])
    assert [row.prompt for row in first_rows(path, Data())] == [row["prompt"] for row in ROWS]


def test_a_row_of_csv_is_told_by_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('prompt,answer\n"one\ntwo",1\n\nthree\nfour,4,5\n')
    with pytest.raises(ValueError) as caught:
        load_rows(path, Data())
    assert str(caught.value).splitlines() == [
        f"{path}: 2 of 3 rows cannot be used",
        f"  {path}:5: it has 1 values for 2 columns; quote those with commas",
        f"  {path}:6: it has 3 values for 2 columns; quote those with commas",
    ]


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.csv", b"prompt,,answer\n1,2,3\n", "has a column without a name"),
        ("a.csv", b"prompt,x,x\n1,2,3\n", "has two columns 'x'"),
        ("a.csv", b"prompt,x\n", "has no rows"),
        ("a.csv", b'prompt,x\n"1,2\n', "not CSV: unexpected end of data"),
        ("a.csv", b"prompt,x\nok,2\n\xff,3\n", "not UTF-8"),
        ("a.jsonl.gz", b'{"prompt": "a"}\n', "cannot be decompressed"),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n', mtime=0)[:-9], "cannot be decompressed"),
        ("a.jsonl.zst", b'{"prompt": "a"}\n', "cannot be decompressed"),
        ("a.arrow", b"no Arrow at all", "cannot be read as arrow"),
    ],
)
def test_damaged_files_say_so(tmp_path: Path, name: str, content: bytes, why: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=why) as caught:
        load_rows(tmp_path / name, Data())
    assert str(tmp_path / name) in str(caught.value)


def repository(folder: Path, readme: str | None = None) -> Path:
    for name in ("main/train-00000-of-00002", "main/train-00001-of-00002", "main/test", "socratic/train"):
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"prompt": name}) + "\n")
    if readme is not None:
        (folder / "README.md").write_text(f"---\nlicense: mit\n{readme}---\n# A dataset\n")
    return folder


CONFIGS = """configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: [main/test.jsonl]}
- config_name: socratic
  data_files: socratic/*
"""


@pytest.mark.parametrize("readme", [CONFIGS, None])
def test_a_split_of_a_repository(tmp_path: Path, readme: str | None) -> None:
    folder = repository(tmp_path, readme)
    for inside, prompts in {
        "main/train": ["main/train-00000-of-00002", "main/train-00001-of-00002"],
        "main/test": ["main/test"],
        "socratic/train": ["socratic/train"],
    }.items():
        assert [row.prompt for row in load_rows(f"{folder}:{inside}", Data())] == prompts
        assert counting.count_rows(f"{folder}:{inside}") == len(prompts)


@pytest.mark.parametrize(
    ("readme", "inside", "why"),
    [
        (CONFIGS, "", "has several configs: give .*:CONFIG/SPLIT with one of main, socratic"),
        (CONFIGS, ":maim/train", "has no config 'maim'; nearest: main"),
        (CONFIGS, ":main/tset", "has no split 'tset'; nearest: test"),
        ("configs:\n- data_files: none-*\n", "", "no file here is one of none-\\*, which README.md names"),
        ("configs:\n- data_files: ../*.jsonl\n", "", "names files outside its folder"),
        (None, ":main/validation", "no file's name says that it is of the split 'validation'; there are: test.jsonl"),
        (None, ":maim/train", "has no config 'maim'; nearest: main"),
    ],
)
def test_a_split_that_is_not_there_is_answered_with_those_that_are(
    tmp_path: Path, readme: str | None, inside: str, why: str
) -> None:
    folder = repository(tmp_path / "gsm", readme)
    with pytest.raises(ValueError, match=why):
        load_rows(f"{folder}{inside}", Data())
    assert counting.files(f"{folder}{inside}") == []


def test_a_folder_of_splits_by_save_to_disk(tmp_path: Path) -> None:
    saved(tmp_path / "train")
    saved(tmp_path / "test", ROWS[:3])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert len(load_rows(tmp_path, Data())) == len(ROWS)
    assert len(load_rows(f"{tmp_path}:test", Data())) == 3
    with pytest.raises(ValueError, match="has no split 'tets'; nearest: test"):
        load_rows(f"{tmp_path}:tets", Data())


@pytest.mark.parametrize(
    ("state", "content"),
    [("state.json", {"_data_files": [{"filename": "../a.arrow"}]}), ("dataset_dict.json", {"splits": [".."]})],
)
def test_a_saved_folder_names_no_files_outside_of_it(tmp_path: Path, state: str, content: dict[str, Any]) -> None:
    (tmp_path / state).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"names a file outside of it: \.\."):
        load_rows(tmp_path, Data())


def test_files_of_a_folder_without_names_of_splits_are_all_trained_on(tmp_path: Path) -> None:
    jsonl(tmp_path)
    assert len(load_rows(tmp_path, Data())) == len(ROWS)
    with pytest.raises(ValueError, match="no file's name says that it is of the split 'test'; there are: a.jsonl"):
        load_rows(f"{tmp_path}:test", Data())
    (tmp_path / "b.csv").write_text("prompt\nmore\n")
    with pytest.raises(ValueError, match=r"the same split as .csv and as .jsonl: name the files by a pattern"):
        load_rows(tmp_path, Data())


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    source = repository(tmp_path / "source", CONFIGS)
    files = {str(path.relative_to(source)): path.read_bytes() for path in source.rglob("*") if path.is_file()}
    bare = {name: content for name, content in files.items() if name != "README.md"}
    with serving({"datasets/acme/gsm": files, "datasets/acme/bare": bare}, tmp_path, monkeypatch) as address:
        yield address


@pytest.mark.parametrize("repo", ["acme/gsm", "acme/bare"])
def test_a_split_of_a_dataset_on_the_hub_is_downloaded_alone(server: str, repo: str) -> None:
    done = fetched(server, train=f"{repo}:main/train", eval=f"{repo}:main/test")
    assert done.returncode == 0, done.stderr
    train, test = done.stdout.splitlines()[-2:]
    assert train.endswith(":main/train") and [row.prompt for row in load_rows(train, Data())] == [
        "main/train-00000-of-00002",
        "main/train-00001-of-00002",
    ]
    assert [row.prompt for row in load_rows(test, Data())] == ["main/test"]
    assert not any("socratic" in path for path in Hub.asked)
    config = from_dict({"data": {"train": f"{repo}:main/train"}})
    assert hub_data.with_cached_files(config).data.train == train, "the cache has it"
    next(Path(train.rpartition(":")[0]).glob("main/train-00001*")).unlink()
    assert hub_data.with_cached_files(config) == config, "some parts are not all"


def test_a_wrong_config_on_the_hub_is_answered_with_the_right_one(server: str) -> None:
    done = fetched(server, train="acme/gsm:mian/train")
    assert done.returncode == 1 and "has no config 'mian'; nearest: main" in done.stderr


IMAGES = pyarrow.array([{"bytes": b"png", "path": None}] * 2)
FEATURES = {"info": {"features": {"photo": [{"_type": "Image"}], "prompt": {"dtype": "string", "_type": "Value"}}}}


@pytest.mark.parametrize("told", [True, False])
def test_columns_of_images_are_refused_by_name(tmp_path: Path, told: bool) -> None:
    columns = {"prompt": pyarrow.array(["a", "b"]), "photo": pyarrow.array([[], []]) if told else IMAGES}
    data = pyarrow.table(columns)
    if told:
        data = data.replace_schema_metadata({"huggingface": json.dumps(FEATURES)})
    pyarrow.parquet.write_table(data, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"columns that are no text: 'photo' \(image\)"):
        load_rows(tmp_path / "a.parquet", Data())


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "a", "images": ["a.png"]}, "the column 'images' holds no text"),
        ({"prompt": "a", "image": "https://x/y.JPG"}, "the column 'image' holds no text"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text"}]}]}, "message 1 holds image"),
        ({"prompt": "a", "images": [], "image": "python:3.12", "imagery": ["a.png"]}, None),
    ],
)
def test_rows_with_images_are_refused_by_name(tmp_path: Path, row: dict[str, Any], why: str | None) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    if why is None:
        assert load_rows(tmp_path / "a.jsonl", Data())
        return
    with pytest.raises(ValueError, match=why):
        load_rows(tmp_path / "a.jsonl", Data())


def test_messages_need_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    messages = [{"role": "user", "content": "Hello"}]
    Path("a.jsonl").write_text(f"{json.dumps({'messages': messages, 'answer': 1})}\n" * 40)
    (row, *_) = load_rows("a.jsonl", Data())
    assert row.prompt == messages and row.fields == {"answer": 1}
    with pytest.raises(ValueError, match="it has no 'question'"):
        load_rows("a.jsonl", Data(prompt_key="question"))
    main(["plan", "tiny_cpu", "data.train=a.jsonl", "data.eval=null", "--json"])
    assert "data_has_prompts" not in capsys.readouterr().out
