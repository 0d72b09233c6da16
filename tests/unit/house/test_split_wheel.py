"""Wheels that are split into parts for machines that take only so much at once: together they are the wheel (1 s)."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.acceptance.split_wheel import main, split

LIMIT = 6000
files = st.dictionaries(
    st.from_regex(r"[a-z]{1,8}(/[a-z]{1,8}){0,2}\.(py|so)", fullmatch=True), st.binary(max_size=4000), max_size=8
)


def wheel(folder: Path, contents: dict[str, bytes]) -> Path:
    path = folder / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in contents.items():
            archive.writestr(name, data)
    return path


@settings(max_examples=40, deadline=None)
@given(contents=files)
def test_the_pieces_are_the_wheel(tmp_path_factory: pytest.TempPathFactory, contents: dict[str, bytes]) -> None:
    folder = tmp_path_factory.mktemp("cut")
    made = split(wheel(folder, contents), folder / "out", LIMIT, without=["*.so"])
    found: dict[str, bytes] = {}
    for path in made:
        assert path.stat().st_size <= LIMIT
        with zipfile.ZipFile(path) as part:
            assert not found.keys() & set(part.namelist()), "a file is in two parts"
            found |= {name: part.read(name) for name in part.namelist()}
    assert found == {name: data for name, data in contents.items() if name.endswith(".py")}


def test_pieces_are_unpacked_as_the_page_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contents = {f"thing/part{n}.py": f"VALUE = {n}\n".encode() * 50 for n in range(3)} | {"thing/__init__.py": b""}
    source = wheel(tmp_path, contents)
    assert main([str(source), "--out", str(tmp_path / "out"), "--mib", "0.0006"]) == 0
    listed = capsys.readouterr().out.splitlines()
    parts = sorted((tmp_path / "out").glob("*.zip"))
    assert len(parts) == len(listed) > 1
    for part in parts:
        subprocess.run([sys.executable, "-m", "zipfile", "-e", str(part), str(tmp_path / "site")], check=True)
    assert {str(p.relative_to(tmp_path / "site")) for p in (tmp_path / "site").rglob("*.py")} == set(contents)


def test_a_file_that_fits_into_no_piece(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = wheel(tmp_path, {"large.so": bytes(range(256)) * 100})
    assert main([str(source), "--out", str(tmp_path), "--mib", "0.0003"]) == 1
    assert "large.so has 0.0 MiB" in capsys.readouterr().err
    assert main([str(source), "--out", str(tmp_path), "--mib", "0.0003", "--without", "*.so"]) == 0
    (tmp_path / "no.whl").write_text("no archive")
    assert main([str(tmp_path / "no.whl")]) == 1 and "not a zip file" in capsys.readouterr().err
