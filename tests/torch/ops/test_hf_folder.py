"""Hugging Face folders, written a tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from gspo_hpc.ops import hf_folder

Named = tuple[str, torch.Tensor]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"hidden_size": 8, "torch_dtype": "float16", "quantization_config": {"quant_method": "fp8"}})
    )
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_text("not to be copied")
    return folder


@given(
    shapes=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    limit=st.integers(1, 400),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_is_read_back(
    source: Path, tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], dtype: torch.dtype, limit: int
) -> None:
    """By the safetensors library and by us, however many files it takes."""
    tensors = {f"t{i}": torch.randn(shape).to(dtype) for i, shape in enumerate(shapes)}
    out = tmp_path_factory.mktemp("out") / "model"
    announced = [(name, tuple(tensor.shape)) for name, tensor in tensors.items()]
    hf_folder.write(out, source, announced, dtype, iter(tensors.items()), limit)
    files = sorted(out.glob("*.safetensors"))
    assert all(sum(t.nbytes for t in load_file(file).values()) <= limit or len(load_file(file)) == 1 for file in files)
    read = {name: tensor for file in files for name, tensor in load_file(file).items()}
    folder = hf_folder.Folder(out)
    assert folder.names() == read.keys() == tensors.keys()
    assert (out / "model.safetensors.index.json").exists() == (len(files) > 1)
    for name, tensor in tensors.items():
        assert read[name].dtype == dtype and torch.equal(read[name], tensor) and torch.equal(folder.read(name), tensor)


def test_settings_and_tokenizer_go_along(source: Path, tmp_path: Path) -> None:
    hf_folder.write(tmp_path / "out", source, [("a", (2,))], torch.bfloat16, iter([("a", torch.ones(2).bfloat16())]))
    assert json.loads((tmp_path / "out/config.json").read_text()) == {"hidden_size": 8, "dtype": "bfloat16"}
    assert (tmp_path / "out/tokenizer.json").exists()
    assert load_file(tmp_path / "out/model.safetensors").keys() == {"a"}


def test_a_folder_appears_whole_or_not_at_all(source: Path, tmp_path: Path) -> None:
    def breaks() -> Iterator[Named]:
        yield "a", torch.ones(2)
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone"):
        hf_folder.write(tmp_path / "out", source, [("a", (2,)), ("b", (2,))], torch.float32, breaks())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out/file").touch()
    with pytest.raises(ValueError, match="exists and is not empty"):
        hf_folder.write(tmp_path / "out", source, [], torch.float32, iter(()))


def test_a_folder_that_cannot_be_made_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (Path("/proc/exported"), tmp_path / "file", tmp_path / "file" / "exported"):
        with (
            pytest.raises(ValueError, match=f"^{out} cannot be written: .+; give another folder$"),
            hf_folder.whole(out),
        ):
            pass


def test_missing_tensors_are_named(source: Path, tmp_path: Path) -> None:
    hf_folder.write(tmp_path / "out", source, [("a", (2,))], torch.float32, iter([("a", torch.ones(2))]))
    with pytest.raises(ValueError, match="tensor b is missing"):
        hf_folder.Folder(tmp_path / "out").read("b")
    (tmp_path / "out/model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        hf_folder.Folder(tmp_path / "out")


@pytest.mark.parametrize("content", [b"", b"\x80\x04a pickle", b"\xff" * 100])
def test_a_file_that_is_none_is_told_in_a_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file, or it is cut off") as told:
        hf_folder.Folder(tmp_path)
    assert len(str(told.value).splitlines()) == 1
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}')
    with pytest.raises(ValueError, match="is not a safetensors file"):
        hf_folder.Folder(tmp_path).read("a")
