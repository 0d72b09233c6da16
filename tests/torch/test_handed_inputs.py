"""A config, data, a script or a model's folder from somebody else runs nothing, whichever file of them is a pickle.

Takes half a minute. It would catch a reader that unpickles, or makes objects of YAML, among the files that a run is
made of. Those that a run has written are in tests/torch/checkpoint/test_handed_over.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from gspo_hpc.cli.main import main
from gspo_hpc.config import loader
from gspo_hpc.config.schema import Data
from gspo_hpc.data import rows
from gspo_hpc.models import tokenizers, weight_files
from gspo_hpc.ops import hf_folder
from tests.torch.checkpoint.test_handed_over import KINDS, marks, planted
from tools.make_random_model import make_random_model

# Files that libraries know of a model, whether or not its folder has them.
OF_LIBRARIES = (
    *("pytorch_model.bin", "model.safetensors.index.json", "training_args.bin", "model.pt", "consolidated.00.pth"),
    *("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "added_tokens.json", "special_tokens_map.json"),
    *("preprocessor_config.json", "chat_template.json", "params.json", "tekken.json", "generation_config.json"),
    *("adapter_config.json", "adapter_model.bin", "chat_template.jinja"),
)
COMMANDS = (("plan", "CONFIG"), ("suggest", "CONFIG"), ("doctor", "CONFIG"), ("train", "CONFIG", "--dry-run"))
SCRIPTS = {
    "verl.sh": "source other.sh\npython3 -m verl.trainer.main_ppo --config-path . --config-name other data.train=$X\n",
    "swift.sh": "swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-7B --config other.yaml\n",
    "trl.py": "from trl import GRPOConfig\nGRPOConfig(output_dir='x')\n",
    "trl.yaml": "model_name_or_path: Qwen/Qwen2.5-7B\nloss_type: grpo\n",
    "other.sh": "X=1\n",
    "other.yaml": "data: {}\n",
    "rows.jsonl": '{"prompt": "1 + 1 = ?", "answer": "2"}\n' * 4,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config of a small model, with data of both kinds and marks of pickles beside it."""
    model = make_random_model(tmp_path / "model", hidden=64, layers=1, intermediate=64, vocab=128)
    make_random_model(tmp_path / "teacher", hidden=64, layers=1, intermediate=64, vocab=128)
    (tmp_path / "rows.jsonl").write_text(SCRIPTS["rows.jsonl"] * 4)
    table = pyarrow.table({"prompt": ["1 + 1 = ?"] * 8, "answer": ["2"] * 8})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "marks").mkdir()
    made = {
        "run": {"max_steps": 1},
        "cluster": {"platform": "cpu", "threads_per_rank": 1},
        "model": {"path": str(model), "dtype": "float32"},
        "batch": {"num_generations": 4, "global_batch_size": 8, "micro_batch_tokens": 256},
        "data": {"train": str(tmp_path / "rows.jsonl"), "eval": str(tmp_path / "rows.parquet")},
        "rollout": {"max_prompt_length": 32, "max_response_length": 8},
        "algorithm": {"teacher": str(tmp_path / "teacher"), "kl_beta": 0.1},
        "reward": {"functions": [{"function": "number_match"}]},
        "tracking": {"wandb": "disabled"},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(made))
    return path


def contents(name: str, marked: Path) -> list[bytes]:
    """Return what is planted in a file of this name: YAML that makes an object, or pickles of both kinds."""
    if name.endswith((".yaml", ".yml")):
        return [planted(Path(name), marked)]
    return [make(marked / "pickle") for make in KINDS.values()]


@contextlib.contextmanager
def in_place(path: Path, content: bytes) -> Iterator[None]:
    """Have this content in a file within the block."""
    before = path.read_bytes() if path.exists() else None
    path.write_bytes(content)
    yield
    path.unlink() if before is None else path.write_bytes(before)


def readers(folder: Path) -> list[Callable[[], object]]:
    """Return what ranks, engines' owners and evaluations read of a model's folder, and their libraries."""

    def weights() -> None:
        found = hf_folder.Folder(folder)
        for name in found.names():
            found.read(name)

    return [
        lambda: hf_folder.tokenizer(folder),
        lambda: hf_folder.configuration(folder),
        lambda: [weight_files.read_header(path) for path in weight_files.paths(folder)],
        lambda: tokenizers.difference(folder, folder.with_name("teacher")),
        weights,
    ]


def refuses(words: tuple[str, ...], config: Path, capsys: pytest.CaptureFixture[str]) -> bool:
    """Run a command; return whether it ends with a refusal or a finding, which is never a traceback."""
    code = main([str(config) if word == "CONFIG" else word for word in words])
    said = capsys.readouterr()
    assert code in (0, 1, 2, 3) and "Traceback" not in said.err + said.out, (words, said.err)
    return code != 0


@pytest.mark.timeout(300)
def test_a_pickle_in_no_file_of_a_model_runs(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, marked = config.with_name("model"), config.with_name("marks")
    own = [path.name for path in sorted(model.iterdir())]
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(own)
    for name in dict.fromkeys((*own, *OF_LIBRARIES)):
        for content in contents(name, marked):
            with in_place(model / name, content):
                for read in readers(model):
                    with contextlib.suppress(Exception):  # it may refuse the file as it likes
                        read()
                refused = refuses(("plan", "CONFIG"), config, capsys)
            assert marks(marked) == [], name
            assert refused or name not in ("config.json", "model.safetensors", "tokenizer.json"), name


@pytest.mark.timeout(300)
def test_a_pickle_in_no_file_that_a_config_names_runs(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, marked = config.parent, config.with_name("marks")
    names = ("config.yaml", "rows.jsonl", "rows.parquet", "teacher/config.json", "teacher/model.safetensors")
    for name in names:
        for content in contents(name, marked):
            with in_place(folder / name, content):
                refused = [refuses(words, config, capsys) for words in COMMANDS]
                if name.startswith("rows"):
                    with pytest.raises(ValueError, match=name):
                        rows.load_rows(folder / name, Data())
                if name.endswith(".yaml"):
                    with pytest.raises(ValueError, match=name):
                        loader.load(folder / name)
            assert marks(marked) == [] and any(refused), (name, refused)


def test_a_pickle_in_no_file_that_a_script_reads_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    marked = tmp_path / "marks"
    marked.mkdir()
    for name, text in SCRIPTS.items():
        (tmp_path / name).write_text(text)
    sources = [name for name in SCRIPTS if not name.startswith(("other", "rows"))]
    for number, name in enumerate(SCRIPTS):
        for content in contents(name, marked):
            with in_place(tmp_path / name, content):
                for source in sources:
                    main(["convert", source])
                    main(["init", f"made-{number}-{source}", "--from", source])
                main(["init", f"made-{number}-{len(content)}", "--from", "rows.jsonl"])
                assert "Traceback" not in capsys.readouterr().err
            assert marks(marked) == [], name
