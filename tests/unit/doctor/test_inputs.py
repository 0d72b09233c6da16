"""Model, data, graders and plan, as doctor finds them: whole, cut off, mistyped."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_hpc.config import loader
from gspo_hpc.config.paths import PRESETS as PRESET_FOLDER
from gspo_hpc.config.schema import Config
from gspo_hpc.data import rows as data_rows
from gspo_hpc.doctor import finding, inputs
from gspo_hpc.doctor import sizes as doctor_sizes
from gspo_hpc.doctor.finding import Finding
from gspo_hpc.models import catalog
from gspo_hpc.models.weight_files import read_header
from gspo_hpc.planning.plan import make_plan
from tests.folders import MODEL, model_folder, safetensors, tensors

PRESETS = sorted(path for path in PRESET_FOLDER.glob("*.yaml") if not path.stem.endswith("_cpu"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1 + 1 = ", "answer": "2"}\n' * 40)
    return path


def given_config(model: Path, rows: Path, *overrides: str) -> Config:
    words = [f"model.path={model}", f"data.train={rows}", "cluster.platform=cpu", "run.max_steps=2"]
    words += ["batch.num_generations=4", "batch.global_batch_size=16", "batch.micro_batch_size=1"]
    words += ["rollout.max_prompt_length=32", "rollout.max_response_length=32"]
    return loader.load(None, [*words, "reward.functions=[{function: number_match}]", *overrides])


def look(config: Config) -> dict[str, Finding]:
    """The findings by check; of several the worst."""
    found: dict[str, Finding] = {}
    for one in inputs.findings(config):
        if one.check not in found or one.state == "fail":
            found[one.check] = one
    return found


def test_all_is_there(model: Path, rows: Path) -> None:
    found = look(given_config(model, rows))
    assert {one.check for one in found.values() if one.state == "fail"} == set()
    assert found["model"].finding.startswith("Qwen3ForCausalLM, 2 layers of 64")
    assert found["weights"].finding.startswith("2 files")
    assert found["training data"].finding.startswith("40 rows")
    assert "with a chat template" in found["tokenizer"].finding
    assert found["reward functions"].finding == "number_match (tried)"


def test_no_model_folder(model: Path, rows: Path) -> None:
    missing = look(given_config(model / "not", rows))["model"]
    assert missing.state == "fail" and "no such folder" in missing.finding and os.getcwd() in missing.fix
    file = look(given_config(model / "config.json", rows))["model"]
    assert "it is a file" in file.finding


@pytest.mark.parametrize("cut", [1, 9, 40, 4])
def test_a_shard_that_is_cut_off(model: Path, rows: Path, cut: int) -> None:
    shard = model / "model-1.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-cut] if cut != 4 else content[:4])
    found = look(given_config(model, rows))["weights"]
    assert found.state == "fail" and "model-1.safetensors: " in found.finding and "cut off" in found.finding
    assert "again" in found.fix


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_damage_of_a_header_is_a_traceback(data: st.DataObject) -> None:
    """Whatever the bytes are: read as tensors that fit the file, or refused by name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        safetensors(path, {"a": (3, 5), "b": (2,)})
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 61))] = data.draw(st.integers(0, 255))
        path.write_bytes(content)
        try:
            places = read_header(path)
        except ValueError as error:
            assert str(error).startswith("x.safetensors: ")
        else:
            assert max((one.end for one in places.values()), default=0) < len(content)


@pytest.mark.parametrize(
    ("begin", "end", "shape", "problem"),
    [
        (0, 8, [2], "tensor a begins at byte 0, and the one before ends at 8"),
        (64, 72, [2], "tensor b begins at byte 64, and the one before ends at 60"),
        (60, 68, [-1, -2], "tensor b has 8 bytes, which does not match its shape"),
    ],
)
def test_tensors_lie_one_after_the_other(begin: int, end: int, shape: list[int], problem: str, tmp_path: Path) -> None:
    """The safetensors library refuses the rest, after the queue."""
    header = {
        "a": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]},
        "b": {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + bytes(max(60, end)))
    with pytest.raises(ValueError, match=problem):
        read_header(tmp_path / "x")


def test_shards_that_do_not_fit_their_index(model: Path, rows: Path) -> None:
    config = given_config(model, rows)
    whole = tensors()
    first, second = list(whole)[:2]
    safetensors(model / "model-1.safetensors", {first: whole[first]})
    assert f"model-1.safetensors lacks {second}, although" in look(config)["weights"].finding
    (model / "model-1.safetensors").unlink()
    assert "model-1.safetensors is missing" in look(config)["weights"].finding
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    assert "outside of the folder" in look(config)["weights"].finding
    (model / "model.safetensors.index.json").write_text("{")
    assert "is not readable" in look(config)["weights"].finding
    (model / "model.safetensors.index.json").unlink()
    assert "no model.safetensors" in look(config)["weights"].finding
    safetensors(model / "model.safetensors", whole)
    assert look(config)["weights"].finding.startswith("1 file, ")


def test_a_family_that_is_not_supported(model: Path, rows: Path) -> None:
    (model / "config.json").write_text(json.dumps(MODEL | {"architectures": ["GPT2LMHeadModel"]}))
    found = look(given_config(model, rows))["model"]
    assert found.state == "fail" and "GPT2LMHeadModel" in found.finding and "Qwen3ForCausalLM" in found.fix
    (model / "config.json").write_text("{")
    assert "is not JSON" in look(given_config(model, rows))["model"].finding


def test_tokenizers(model: Path, rows: Path) -> None:
    (model / "tokenizer_config.json").write_text("{}")
    found = look(given_config(model, rows))["tokenizer"]
    assert found.state == "fail" and "data.chat_template=false" in found.fix
    assert look(given_config(model, rows, "data.chat_template=false"))["tokenizer"].state == "ok"
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert look(given_config(model, rows))["tokenizer"].state == "ok"
    (model / "tokenizer_config.json").write_text("{")
    assert "is not JSON" in look(given_config(model, rows))["tokenizer"].finding
    (model / "tokenizer.json").unlink()
    assert "has none of tokenizer.json" in look(given_config(model, rows))["tokenizer"].finding


def test_rows_that_cannot_be_used(model: Path, rows: Path, tmp_path: Path) -> None:
    lines = rows.read_text().splitlines()
    lines[6] = '{"prmopt": "1"}'
    rows.write_text("\n".join(lines) + "\n")
    found = look(given_config(model, rows))["training data"]
    assert found.state == "fail" and "1 of 40 rows" in found.finding and f"{rows}:7: " in found.finding
    assert "data.prompt_key" in found.fix
    gone = look(given_config(model, tmp_path / "gone.jsonl"))["training data"]
    assert gone.state == "fail" and "No such file" in gone.finding
    few = look(given_config(model, rows, "batch.global_batch_size=400"))["plan"]
    assert few.state == "ok"  # rows that cannot be read are not counted
    rows.write_text('{"prompt": "a"}\n' * 3)
    few = look(given_config(model, rows))["plan"]
    assert few.state == "fail" and "the training data has 3 prompts" in few.finding


def test_of_a_large_file_only_the_head_is_read(model: Path, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "WHOLE_FILE_BYTES", 100)
    found = look(given_config(model, rows))["training data"]
    assert found.state == "ok" and "the first 1,000 rows" in found.finding
    rows.write_text('{"prompt": "a"}\n' * 5 + "no json\n" + '{"prompt": "a"}\n' * 5000)
    bad = look(given_config(model, rows))["training data"]
    assert bad.state == "fail" and f"{rows}:6: not JSON" in bad.finding and "1 of 1000" in bad.finding
    rows.write_text('{"prompt": "a"}\n' * 1500 + "no json\n")
    assert look(given_config(model, rows))["training data"].state == "ok"


def test_a_plan_that_is_refused(model: Path, rows: Path) -> None:
    broken = look(given_config(model, rows, "batch.num_generations=3"))["plan"]
    assert broken.state == "fail" and "4 broken rules (rollout_groups_whole, " in broken.finding and "=" in broken.fix
    server = look(given_config(model, rows, "rollout.mode=server"))["plan"]
    assert server.state == "fail"
    wide = look(given_config(model, rows, "cluster.nodes=2", "rollout.tensor_parallel_size=2"))["plan"]
    assert wide.state == "fail" and wide.finding.endswith("give rollout.tensor_parallel_size=1")
    missing = inputs.findings(loader.load(None, ["cluster.platform=cpu"]))
    (needs,) = [one for one in missing if one.check == "config"]
    assert needs.state == "fail" and "run.max_steps" in needs.finding and "reward.functions" in needs.finding


def test_graders(model: Path, rows: Path, tmp_path: Path) -> None:
    def look_at(function: str) -> Finding:
        return look(given_config(model, rows, f"reward.functions=[{{function: '{function}'}}]"))["reward functions"]

    path = tmp_path / "mine.py"
    path.write_text("def grade(completion, *, prompt, fields):\n    return 1.0\n")
    assert look_at(f"{path}:grade").finding.endswith("mine.py:grade (tried)")
    typo = look_at("number_mtch")
    assert typo.state == "fail" and "number_match" in typo.finding
    assert "grade" in look_at(f"{path}:grad").finding
    path.write_text("import a_module_that_is_not_here\ndef grade(completion, *, prompt, fields):\n    return 1.0\n")
    lacks = look_at(f"{path}:grade")
    assert lacks.state == "fail" and "No module named 'a_module_that_is_not_here'" in lacks.finding


def test_sizes_are_those_of_the_plan(model: Path, rows: Path) -> None:
    """Bytes by the formulas in words: Adam's two moments and, for 16 bit, masters."""
    config = given_config(model, rows, "model.dtype=float32", "cluster.gpus_per_node=2", "rollout.engines_per_node=1")
    sizes = doctor_sizes.of(config)
    assert sizes is not None
    attention = 64 * (64 + 64) + 64 * 64 + 2 * 32 + 2 * 64  # queries, keys and values, output, norms
    count = 2 * (attention + 3 * 64 * 128) + 256 * 64 + 64
    assert sizes.checkpoint == count * 12 and sizes.rank_gpu == 0
    # Two ranks, an engine and its cache, and the copy that one of the ranks makes to save it.
    assert sizes.host == 2 * count * 16 + count * 4 + 2**30 + count * 12
    gpu = doctor_sizes.of(given_config(model, rows, "cluster.platform=cuda", "rollout.sleep_level=1"))
    assert gpu is not None and gpu.rank_gpu == count * (2 + 4 + 12) and gpu.checkpoint == count * 14
    # What is offloaded (gradients are dropped), the copy that is saved, and the weights of the engine that sleeps; but
    # for these at level 2.
    assert gpu.host == count * (2 + 12) + count * (2 + 12) + count * 2
    dropped = doctor_sizes.of(given_config(model, rows, "cluster.platform=cuda"))
    assert dropped is not None and dropped.host == gpu.host - count * 2
    assert doctor_sizes.of(given_config(model / "gone", rows)) is None


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_the_memory_of_a_node_is_what_the_plan_says(path: Path, tmp_path: Path) -> None:
    """For every preset with a GPU: the plan's total without what processes take for themselves."""
    known = catalog.find(str(loader.load(path).model.path))
    (tmp_path / "config.json").write_text(json.dumps(catalog.content(str(known))))
    config = loader.load(path, [f"model.path={tmp_path}"])
    sizes, plan = doctor_sizes.of(config), make_plan(config)
    assert sizes is not None and plan.memory is not None
    told = plan.memory.to_json()["host_bytes"]
    assert 0 < sizes.host == told["total"] - told["processes"] < told["total"]


def test_engines_and_references_on_a_cpu_are_counted(model: Path, rows: Path) -> None:
    """In bytes of a parameter: two copies of the weights for a KL term, two for an engine on a GPU of its own."""

    def host(*overrides: str) -> int:
        found = doctor_sizes.of(given_config(model, rows, "model.dtype=float32", *overrides))
        assert found is not None
        return found.host

    count = 90_560
    three = "cluster.gpus_per_node=3"
    assert host("algorithm.kl_beta=0.1") - host() == 2 * count * 4
    assert host("checkpoint.async_save=false") == host() - count * 12
    apart = (three, "rollout.mode=server", "rollout.engines_per_node=1")
    two, one_copy = host("cluster.gpus_per_node=2", "rollout.engines_per_node=1"), count * 4
    alone = host(*apart, "faults.max_engine_restarts=0")
    assert alone == two + one_copy, "two ranks train, and the one that generates keeps the weights for its engine"
    assert host(*apart) == alone + one_copy, "the first of those that train, for ranks that start again"


def test_shared_memory_grows_with_what_uses_it() -> None:
    def needed(*overrides: str) -> int:
        return doctor_sizes.shm_needed(loader.load(None, list(overrides)))

    one = needed("cluster.platform=cpu")
    assert one == needed("cluster.platform=cuda") < needed("cluster.platform=cuda", "cluster.gpus_per_node=8")
    two = needed("cluster.platform=cuda", "cluster.gpus_per_node=8", "rollout.tensor_parallel_size=4")
    assert two - needed("cluster.platform=cuda", "cluster.gpus_per_node=8") == 2 * 160 * 2**20


def test_own_messages_are_whole_and_others_end_with_a_mark(tmp_path: Path) -> None:
    assert finding.shortened("x" * 200) == "x" * 200
    assert finding.shortened("x" * 201) == "x" * 199 + "…"
    name = "n" * 120
    rows = tmp_path / name / name / name / f"{name}.jsonl"
    rows.parent.mkdir(parents=True)
    rows.write_text("[]\n")
    config = loader.from_dict({"data": {"train": str(rows)}})
    (found,) = [one for one in inputs.findings(config, load_functions=False) if one.check == "training data"]
    assert found.state == "fail" and str(rows) in found.finding
    with pytest.raises(ValueError, match="a row must be an object") as refused:
        data_rows.load_rows(rows, config.data)
    assert found.finding == "; ".join(line.strip() for line in str(refused.value).splitlines()[:2])
    (tmp_path / "long.py").write_text(
        "def grade(completion, *, prompt, fields):\n    return 1.0\n\n\nraise ValueError('y' * 1000)\n"
    )
    config = loader.from_dict({"reward": {"functions": [{"function": f"{tmp_path}/long.py:grade"}]}})
    (found,) = [one for one in inputs.findings(config) if one.check == "reward functions"]
    assert found.state == "fail" and found.finding.endswith("yyy…")


def test_an_environment_is_tried_once(model: Path, rows: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.py"
    game = (
        "class Game:\n    def reset(self, fields, seed):\n        return {'answer': fields['answer'], 'seed': seed}\n"
    )
    game += "    def step(self, state, message):\n        return {'reward': 1.0 * (message == state['answer'])}\n"
    file.write_text(game + "def look(word: str): return word\n")
    both = (f"environment.name={file}:Game", f"environment.tools=[{{function: '{file}:look'}}]")
    (model / "chat_template.jinja").write_text("{{ tools }}<tool_call>")

    def look_at(*words: str) -> Finding:
        return look(given_config(model, rows, *words))["environment"]

    assert look_at(*both).finding.endswith("talk.py:Game (begun, and one message answered)")
    assert look_at(both[1]).finding == f"environment.tools: {file}:look (loaded)"
    assert "environment" not in look(given_config(model, rows))
    wrong = look_at("environment.name=guess_numbr")
    assert wrong.state == "fail" and "nearest: guess_number" in wrong.finding
    file.write_text(game.replace("'answer']", "'anser']"))
    broken = look_at(both[0])
    assert broken.state == "fail" and "KeyError" in broken.finding and broken.fix == f"correct {file}"
    file.write_text("import a_module_that_is_not_here\ndef look(word: str): return word\n")
    assert "No module named 'a_module_that_is_not_here'" in look_at(both[1]).finding
