"""`plan` refuses whatever `train` refuses before it starts ranks, with the same words, over a table of inputs.

Twenty seconds. It catches a config that is called valid, with exit code 0, although a look at the files of this machine
shows that no run can be made of it; and a check that only one of the two commands has.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config import loader
from gspo_hpc.launch import local
from gspo_hpc.launch.slurm import submit
from gspo_hpc.models import catalog
from gspo_hpc.runs.directory import open_run
from tests.folders import MODEL, TOKENIZER, model_folder, safetensors, tensors

ROW = {"prompt": "1 + 1 = ", "answer": "2"}
ROWS = [ROW] * 40
WHOLE = {
    "run": {"max_steps": 2},
    "model": {"path": "model"},
    "cluster": {"platform": "cpu"},
    "batch": {"num_generations": 4, "global_batch_size": 16, "micro_batch_size": 1},
    "data": {"train": "rows.jsonl"},
    "rollout": {"max_prompt_length": 32, "max_response_length": 32},
    "reward": {"functions": [{"function": "number_match"}]},
}
OTHER_TOKENIZER = TOKENIZER | {"model": TOKENIZER["model"] | {"vocab": TOKENIZER["model"]["vocab"] | {"a": 128}}}
Words = list[str]
Fault = Callable[[Path], Words]
HEAD = "completion, *, prompt, fields"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    model_folder(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", *ROWS)
    (tmp_path / "run.yaml").write_text(json.dumps(WHOLE))
    return tmp_path


def write_rows(path: Path, *rows: object) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def planned(capsys: pytest.CaptureFixture[str], words: Words) -> tuple[int, dict[str, object], str]:
    """Exit code, JSON and page of the plan."""
    code = main(["plan", "run.yaml", *words, "--json"])
    told = json.loads(capsys.readouterr().out)
    assert main(["plan", "run.yaml", *words]) == code
    return code, told, " ".join(capsys.readouterr().out.split())


def trained(project: Path, words: Words) -> str | None:
    """The words with which `train` refuses a run before a rank is started; None if it starts one."""
    start = "import pathlib, sys; pathlib.Path('started').touch(); sys.exit(2)"
    try:
        local.train(loader.load("run.yaml", words, run_code=True), worker=[sys.executable, "-c", start])
    except ValueError as refused:
        assert not (project / "started").exists()
        return str(refused)
    assert (project / "started").exists()
    return None


def rows(*rows: object) -> Fault:
    def fault(project: Path) -> Words:
        write_rows(project / "rows.jsonl", *rows)
        return []

    return fault


def file(name: str, content: str | bytes, *words: str) -> Fault:
    def fault(project: Path) -> Words:
        path = project / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        path.chmod(0o600 if b"secret" in path.read_bytes() else 0o644)
        return list(words)

    return fault


def folder(name: str, *words: str) -> Fault:
    def fault(project: Path) -> Words:
        (project / name).mkdir(parents=True)
        return list(words)

    return fault


def words(*words: str) -> Fault:
    return lambda project: list(words)


def sources(*changes: dict[str, object], given: str = "null") -> Fault:
    """Sources of the rows of the project, each with other settings, in place of data.train."""
    of = [{"name": "a", "files": "rows.jsonl"} | change for change in changes]
    return words(f"data.train={given}", f"data.sources={json.dumps(of)}")


def without(*names: str) -> Fault:
    def fault(project: Path) -> Words:
        for name in names:
            (project / name).unlink()
        return []

    return fault


def config_json(**other: object) -> Fault:
    return file("model/config.json", json.dumps(MODEL | other))


def own(code: str, *, name: str = "mark", args: str = "{}") -> Fault:
    return file("own.py", code, f"reward.functions=[{{function: own.py:{name}, args: {args}}}]")


def reward(function: str) -> Fault:
    return words(f"reward.functions=[{{function: {function}}}]")


def single(shapes: dict[str, tuple[int, ...]]) -> Fault:
    def fault(project: Path) -> Words:
        for path in (project / "model").glob("model*"):
            path.unlink()
        safetensors(project / "model" / "model.safetensors", shapes)
        return []

    return fault


def other_format(project: Path) -> Words:
    for path in (project / "model").glob("model*"):
        path.unlink()
    return file("model/pytorch_model.bin", "a")(project)


def cut_off(project: Path) -> Words:
    shard = project / "model" / "model-2.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])
    return []


def other_run(*changed: str, steps: int = 0) -> Fault:
    def fault(project: Path) -> Words:
        run, _ = open_run(loader.load("run.yaml"))
        for step in range(steps + 1):
            run.append_metrics({"step": step})
        return list(changed)

    return fault


def other_record(content: str) -> Fault:
    def fault(project: Path) -> Words:
        run, _ = open_run(loader.load("run.yaml"))
        run.info.write_text(content)
        return []

    return fault


def other_data(project: Path) -> Words:
    other_run(steps=1)(project)
    write_rows(project / "rows.jsonl", *ROWS, ROW)
    return []


KIND = {  # what the refusal has to say in these cases
    "reward: a class": "'mark' is a class",
    "reward: imported": "'mark' is imported",
    "data: less than a rollout": "give more of them",
    "teacher: another tokenizer": 'another tokenizer than model.path model: token "a" has the number 128, not 97',
    "teacher: no tokenizer": "teacher has none of tokenizer.json",
    "teacher: a shard is missing": "model-2.safetensors is missing",
    "teacher: without a weight": "algorithm.teacher needs a weight",
    "teacher: another family": "algorithm.teacher teacher cannot be run by this version",
}
TAUGHT = ("algorithm.teacher=teacher", "algorithm.kl_beta=1.0")


def taught(name: str = "tokenizer.json", content: str | None = None) -> Fault:
    """A teacher of the model's sizes with another content of one of its files; without that file if it is None."""

    def fault(project: Path) -> Words:
        model_folder(project / "teacher")
        if content is None:
            (project / "teacher" / name).unlink()
        else:
            (project / "teacher" / name).write_text(content)
        return list(TAUGHT)

    return fault


MESSAGES = [{"role": "user", "content": "a"}]

# The first half was known when the checks were written, the other half was not.
KNOWN: dict[str, Fault] = {
    "data: a folder": folder("rows", "data.train=rows"),
    "data: a folder named as a file": folder("more.jsonl", "data.train=more.jsonl"),
    "data: a text file": file("rows.txt", "1 + 1 =\n", "data.train=rows.txt"),
    "data: a text file elsewhere": words("data.train=/elsewhere/rows.txt"),
    "data: a table": file("rows.xlsx", "prompt,answer\n1,2\n", "data.eval=rows.xlsx"),
    "data: no JSON": file("rows.jsonl", "1 + 1 =\n" * 40),
    "data: a prompt that is a number": rows(*[ROW | {"prompt": 3}] * 40),
    "data: a prompt that is an object": rows(*[ROW | {"prompt": {"text": "a"}}] * 40),
    "data: an empty prompt": rows(*ROWS, ROW | {"prompt": " "}),
    "data: a row in the middle": rows(*ROWS, [1], *ROWS),
    "data: empty": file("rows.jsonl", ""),
    "evaluation data: a prompt that is a number": file("eval.jsonl", '{"prompt": 1}\n', "data.eval=eval.jsonl"),
    "model: other sizes": config_json(hidden_size=128),
    "model: no tokenizer": without("model/tokenizer.json"),
    "model: a shard is missing": without("model/model-2.safetensors"),
    "model: a shard is cut off": cut_off,
    "reward: no such function": own("def marks(completion, *, prompt, fields):\n    return 1\n"),
    "reward: another signature": own("def mark(prompts, completions, answer):\n    return 1\n"),
    "reward: no answer": rows(*[{"prompt": "a"}] * 40),
    "reward: not built in": reward("number_mach"),
}
HELD_OUT: dict[str, Fault] = {
    "data: not UTF-8": file("rows.jsonl", '{"prompt": "é", "answer": 1}\n'.encode("latin-1") * 40),
    "data: half a character": file("rows.jsonl", '{"prompt": "\\ud800", "answer": 1}\n' * 40),
    "data: ends with the assistant": rows(*[ROW | {"prompt": [*MESSAGES, {"role": "assistant", "content": "b"}]}] * 40),
    "data: an unknown role": rows(*[ROW | {"prompt": [{"role": "human", "content": "a"}]}] * 40),
    "data: parts of a message": rows(*[ROW | {"prompt": [{"role": "user", "content": [{"type": "text"}]}]}] * 40),
    "data: one JSON list": file("rows.jsonl", json.dumps(ROWS)),
    "data: a pattern of other files": file("part-1.csv", "a\n", "data.train=part-*"),
    "data: not parquet": file("rows.parquet", "no parquet", "data.train=rows.parquet"),
    "data: a name on the hub without a file": words("data.train=owner/sums:train/part/one"),
    "data: a text file, in epochs": file("r.txt", "a\n", "data.train=r.txt", "run.max_steps=null", "run.max_epochs=1"),
    "data: other keys": words("data.prompt_key=question"),
    "data: a system prompt without a template": words("data.system_prompt=a", "data.chat_template=false"),
    "model: a file": words("model.path=model/config.json"),
    "model: no config.json": without("model/config.json"),
    "model: a folder of something else": words("model.path=."),
    "model: config.json is not JSON": file("model/config.json", "{"),
    "model: more layers": config_json(num_hidden_layers=3),
    "model: fewer layers": config_json(num_hidden_layers=1),
    "model: another vocabulary": config_json(vocab_size=512),
    "model: a head of its own": config_json(tie_word_embeddings=False),
    "model: another family": config_json(architectures=["GPT2LMHeadModel"]),
    "model: quantized": config_json(quantization_config={"quant_method": "gptq", "bits": 4}),
    "model: other weights than its index": file("model/model-1.safetensors", b"\x02\0\0\0\0\0\0\0{}"),
    "model: an index that is not JSON": file("model/model.safetensors.index.json", "{"),
    "model: an index of other things": file("model/model.safetensors.index.json", '{"weight_map": {"a": [1]}}'),
    "model: weights in another format": other_format,
    "model: names of another class": single({name.removeprefix("model."): shape for name, shape in tensors().items()}),
    "model: no chat template": file("model/tokenizer_config.json", "{}"),
    "model: a tokenizer that is none": file("model/tokenizer.json", "[]"),
    "reward: not Python": own("def mark(:\n"),
    "reward: an argument that it has not": own(f"def mark({HEAD}):\n    return 1\n", args="{scale: 2}"),
    "reward: a folder": folder("own.py", "reward.functions=[{function: own.py:mark}]"),
    "reward: a file without a function": reward("own.py"),
    "reward: an expression that is none": reward('regex, args: {pattern: "("}'),
    "reward: an expression is missing": reward("regex"),
    "reward: an answer without a number": rows(*[ROW | {"answer": "none"}] * 40),
    "teacher: another tokenizer": taught(content=json.dumps(OTHER_TOKENIZER)),
    "teacher: no tokenizer": taught(),
    "teacher: a shard is missing": taught("model-2.safetensors"),
    "teacher: without a weight": words("algorithm.teacher=model"),
    "teacher: another family": taught("config.json", json.dumps(MODEL | {"architectures": ["GPT2LMHeadModel"]})),
    "observer: another signature": file("see.py", "def see():\n    pass\n", "tracking.observers=[see.py:see]"),
    "sources: a column that no row has": sources({"columns": {"quest": "prompt"}}),
    "sources: nothing left": sources({"filter": {"answer": 3}}),
    "sources: a condition on no field": sources({"filter": {"anser": 2}}),
    "sources: more rows than there are": sources({"files": "rows.jsonl#50"}),
    "sources: a function that is none": sources({"rewards": {"number_mach": 1}}),
    "sources: one that is too small": sources({"weight": 40}, {"name": "b", "files": "rows.jsonl#1", "weight": 40}),
    "sources: two of a name": sources({}, {}),
    "sources: beside data.train": sources({}, given="rows.jsonl"),
    "sources: a text file": sources({"files": "rows.txt"}),
    "sources: a function that cannot grade": sources({"columns": {"answer": "gold"}}),
    "data: a table with a row too long": file("rows.csv", "prompt,answer\n1,2,3\n" * 40, "data.train=rows.csv"),
    "reward: a class": own("class mark:\n    pass\n"),
    "reward: imported": own("from math import sqrt as mark\n"),
    "notify: a service that apprise does not know": file("to", "slak://secret/a/b\n", "notify.urls=[file:to]"),
    "prometheus: a file": file("prom", "", "tracking.prometheus=prom"),
    "notify: others may read it": file("to", "json://localhost\n", "notify.urls=[file:to]"),
    "run: a file": file("runs/run", "a", "run.dir=runs/run"),
    "run: below a file": file("runs", "a", "run.dir=runs/run"),
    "run: a view of the kernel": words("run.dir=/proc/run"),
    "run: below a view of the kernel": words("run.dir=/proc/sys/run/x"),
    "run: a folder of something else": file("runs/notes.txt", "a", "run.dir=runs"),
    "data: less than a rollout": rows(*ROWS[:3]),
    "run: another config": other_run("run.seed=7", steps=1),
    "run: other data": other_data,
    "run: a record that is none": other_record("[]"),
    "run: a record that lacks something": other_record("{}"),
}


@pytest.mark.parametrize("name", [*KNOWN, *HELD_OUT])
def test_what_train_refuses_plan_refuses_with_the_same_words(
    name: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (KNOWN | HELD_OUT)[name](project)
    code, told, page = planned(capsys, given)
    refused = trained(project, given)
    assert refused is not None, "train starts it"
    assert code == 2 and told["runnable"] is False, told
    said = "\n".join([*told["errors"], *map(str, told["broken"]), *map(str, told["not_run"])])  # type: ignore[misc]
    for line in refused.splitlines():
        bare = line.strip().partition(": ")[2] if line.startswith("rule ") else line.strip()
        if not line.startswith("nearest fix"):
            assert bare in said.replace("\\'", "'"), (line, said)
            assert " ".join(bare.split())[:40] in page, (bare, page)
    assert "valid as far as checked" not in page and "secret" not in refused + page
    assert KIND.get(name, "") in refused


GPUS = ("cluster.platform=cuda", "rollout.engine.gpu_memory_utilization=0.1")
DRY = {
    "another reward function": reward("number_mach"),
    "a reward function of TRL": own("def mark(prompts, completions, answer):\n    return 1\n"),
    "a reward function that is not Python": own("def mark(:\n"),
    "a reward function that raises": own(f"def mark({HEAD}):\n    return fields['solution']\n"),
    "less than a rollout": rows(*ROWS[:3]),
    "a row in the middle": rows(*ROWS, [1], *ROWS),
    "a shard that is cut off": cut_off,
    "the run directory of another config": other_run("run.seed=7", steps=1),
}


@pytest.mark.parametrize("command", ["train", "submit", "array"])
@pytest.mark.parametrize("name", DRY)
def test_a_dry_run_passes_nothing_that_would_be_refused(
    name: str, command: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = DRY[name](project)
    words = {"train": ["train"], "submit": ["submit"], "array": ["submit", "--array", "optimizer.lr=1e-6,2e-6"]}
    if command == "array" and name.startswith("the run"):
        folder = project / "runs" / "run"
        folder.rename(project / "runs" / "lr-1e-6")
        folder.mkdir()
        (project / "runs" / "lr-1e-6").rename(folder / "lr-1e-6")
    first, *more = words[command]
    refused = trained(project, given) if command == "train" else None
    assert main([first, "run.yaml", *given, "--dry-run", *more]) == 2
    said = capsys.readouterr()
    told = [line.removeprefix("error: ") for line in said.err.splitlines() if line.startswith("error: ")]
    assert said.out == "" and 0 < len(told) < 5 and "Traceback" not in said.err
    if refused is not None:
        assert all(line.strip() in "\n".join(told) for line in refused.splitlines()), (told, refused)


@pytest.mark.parametrize("more", [[], ["--array", "optimizer.lr=1e-6,2e-6"]])
def test_a_dry_run_says_what_is_not_on_this_machine(
    more: Words, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "run.yaml", "data.train=/elsewhere/rows.jsonl", "--dry-run", *more]) == 0
    said = capsys.readouterr()
    assert "#SBATCH" in said.out and said.err.count("not checked: ") == 1, said.err
    assert "not checked: data.train /elsewhere/rows.jsonl is not there\n" in said.err


@pytest.mark.parametrize(
    ("seen", "gpus", "told"),
    [
        (None, 1, "cluster.platform: cuda, but this machine has no NVIDIA driver"),
        ("", 1, "cluster.gpus_per_node: 1 ranks need a GPU each, but CUDA_VISIBLE_DEVICES= names no GPUs"),
        ("2, 3", 4, "cluster.gpus_per_node: 4 ranks need a GPU each, but CUDA_VISIBLE_DEVICES=2, 3 names 2 GPUs"),
        ("0,-1,1", 2, "but CUDA_VISIBLE_DEVICES=0,-1,1 names 1 GPU\nset cluster.gpus_per_node=1, or"),
        ("0,1,2,3", 4, ""),
    ],
)
def test_gpus_that_this_machine_cannot_have_are_missed_before_there_is_a_run(
    seen: str | None, gpus: int, told: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan of the same config is valid: it may be for another machine."""
    monkeypatch.setattr("gspo_hpc.launch.accelerators.has_driver", lambda: seen is not None)
    monkeypatch.setattr("gspo_hpc.launch.accelerators.devices", lambda: 0)
    monkeypatch.setattr("gspo_hpc.launch.accelerators.torch_build", lambda: "2.13.0+cu130")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    given = [*GPUS, f"cluster.gpus_per_node={gpus}"]
    assert main(["plan", "run.yaml", *given]) == 0
    refused = trained(project, given)
    assert (refused is None) == (told == "")
    if refused is not None:
        assert told in refused and len(refused.splitlines()) == 2 and not (project / "runs").exists()
        with pytest.raises(ValueError, match="cluster") as dry:
            local.dry_run(loader.load("run.yaml", given))
        assert str(dry.value) == refused


def test_a_torch_without_cuda_is_told_before_there_is_a_run(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gspo_hpc.launch.accelerators.has_driver", lambda: True)
    monkeypatch.setattr("gspo_hpc.launch.accelerators.torch_build", lambda: "2.13.0+cpu")
    assert "torch 2.13.0+cpu is built for CPUs" in str(trained(project, [*GPUS]))
    assert not (project / "runs").exists()


def test_a_run_directory_that_no_batch_script_can_name(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["cluster.nodes=2", "run.dir=runs/$HOME"]
    code, told, _ = planned(capsys, given)
    with pytest.raises(ValueError, match="not safe in a batch script") as refused:
        submit.checked(loader.load("run.yaml", given), set())
    assert code == 2 and str(refused.value) in str(told["errors"]) and planned(capsys, given[1:])[0] == 0


def _absent() -> Iterator[tuple[str, Fault, str]]:
    yield "data", without("rows.jsonl"), "data.train rows.jsonl is not there: its prompts are not counted. A run needs"
    yield "eval", words("data.eval=/elsewhere/e.parquet"), "data.eval /elsewhere/e.parquet is not there. A run needs"
    yield "hub", words("data.train=owner/sums:train.jsonl"), "is not in the cache of the hub"
    yield (
        "source",
        sources({"files": "b.csv#2"}),
        "data.sources[0].files b.csv is not there: its prompts are not counted.",
    )
    yield "source on the hub", sources({"files": "openai/gsm8k:main/train#2"}), "is not in the cache of the hub"
    yield "reward", reward("/elsewhere/own.py:mark"), "/elsewhere/own.py is not there"
    yield "observer", words("tracking.observers=[/elsewhere/see.py:see]"), "/elsewhere/see.py is not there"
    yield "prometheus", words("tracking.prometheus=/elsewhere"), "there is no folder /elsewhere"
    yield "address", words("notify.urls=[env:NOT_SET_HERE]"), "the variable NOT_SET_HERE is not set"
    weights = ("model/model-1.safetensors", "model/model-2.safetensors")
    yield "weights", without(*weights), "model.path model: model-1.safetensors is missing"
    yield "small files", without(*weights, "model/tokenizer.json"), "model.path model has none of tokenizer.json"


@pytest.mark.parametrize(("name", "fault", "note"), list(_absent()), ids=[one[0] for one in _absent()])
def test_what_is_not_on_this_machine_is_said_and_not_refused(
    name: str, fault: Fault, note: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = fault(project)
    code, told, page = planned(capsys, given)
    assert told["runnable"] is None and told["errors"] == [], told
    assert (code, bool(told["absent"]), bool(told["downloads"])) == (
        (0, False, True) if "hub" in name else (3, True, False)
    )
    assert any(note in one for one in told["not_checked"]), told["not_checked"]  # type: ignore[attr-defined]
    verdict = "valid as far as checked" if "hub" in name else "valid, but not all that it names is on this machine"
    assert verdict in page and "Not checked" in page
    assert trained(project, given) is not None


def test_a_run_directory_that_this_user_cannot_write(project: Path) -> None:
    """Another machine, or another user, may have it: so it is said, and refused only where a run starts."""
    (project / "closed").mkdir(mode=0o500)
    usual: list[str] = []
    if os.geteuid() == 0:  # who may write everywhere, but for this
        usual = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override"]
        if shutil.which("setpriv") is None:
            pytest.skip("root may write everywhere, and setpriv (util-linux) is not installed")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [*usual, sys.executable, "-m", "gspo_hpc", *words, "run.dir=closed/runs/x"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    told = f"{project}/closed/runs/x cannot be written here: {project}/closed is not writable for you"
    plan = run("plan", "run.yaml", "--json")
    found = json.loads(plan.stdout)
    assert (plan.returncode, found["absent"], found["errors"]) == (3, ["run.dir"], []), found
    assert any(f"run.dir {told}. A run writes everything there." in text for text in found["not_checked"])
    train = run("train", "run.yaml")
    assert train.returncode == 2 and train.stderr.endswith(f"error: run.dir: {told}\n")


@pytest.mark.parametrize(
    "good",
    [
        words(),
        single(tensors() | {"lm_head.weight": (256, 64)}),
        rows(*[ROW | {"prompt": MESSAGES}] * 40),
        own(f"def mark({HEAD}, scale=1):\n    return scale\n", args="{scale: 2}"),
        other_run(),
        other_run("run.max_steps=4"),
        other_run("run.max_steps=4", steps=1),
        other_run("run.seed=7", "rollout.temperature=0.5"),
        other_run("run.max_steps=null", "run.max_epochs=1"),
        folder("runs/run", "run.dir=runs/run"),
    ],
)
def test_what_train_starts_plan_calls_valid(good: Fault, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = good(project)
    code, told, page = planned(capsys, given)
    refused = trained(project, given)
    assert (code, told["errors"], refused) == (0, [], None), page


def test_large_files_are_looked_at_from_their_beginning(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row beyond that is left to `train`, and the first rows are not."""
    many = [ROW | {"filler": "a" * 1000}] * 2000
    write_rows(project / "rows.jsonl", *many, [1])
    code, told, _ = planned(capsys, [])
    assert code == 0 and "rows.jsonl:2001: a row must be" in str(trained(project, []))
    write_rows(project / "rows.jsonl", ROW, [1], *many)
    code, told, _ = planned(capsys, [])
    (headline, row) = told["errors"]  # type: ignore[misc]
    assert code == 2 and "rows.jsonl: 1 of the first " in headline and row.strip() in str(trained(project, []))
    (project / "rows.jsonl").write_text(
        json.dumps(ROW | {"filler": "a" * 2**21}) + "\n" + "".join(json.dumps(ROW) + "\n" for _ in ROWS)
    )
    assert planned(capsys, [])[0] == 0


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen2.5-0.5B", "Mixtral-8x7B", "Qwen3-30B-A3B", "Mistral-7B-v0.3"])
def test_the_tensors_of_models_that_are_trained_are_no_mistake(name: str) -> None:
    """The table is the one that weights are loaded by; each family has names of its own."""
    from gspo_hpc.models import architecture, weight_table

    arch = architecture.parse(catalog.content(name))
    whole = weight_table.stage_table(arch, 0, arch.num_layers, True, True)
    by_layer = [
        one
        for layer in range(arch.num_layers)
        for one in weight_table.stage_table(arch, layer, 1, layer == 0, layer == arch.num_layers - 1)
    ]
    assert {one.hf: one.shapes for one in by_layer} == {one.hf: one.shapes for one in whole}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "rows.jsonl").chmod(0)
    code, told, _ = planned(capsys, [])
    assert code == 2 and "Permission denied" in str(told["errors"])


def test_rows_of_the_evaluation_are_graded_by_the_function_that_decides(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They may lack what only a term of training asks for. Without the answer, no evaluation would be graded."""
    write_rows(project / "held_out.jsonl", {"prompt": "2 + 2 = "})
    given = ["data.eval=held_out.jsonl"]
    code, told, _ = planned(capsys, given)
    (error,) = told["errors"]  # type: ignore[misc]
    assert code == 2 and "number_match cannot grade held_out.jsonl:1: the data row has no field 'answer'" in error
    assert str(trained(project, given)) == error.removeprefix("run.yaml:1: ")
    more = ["reward.functions=[{function: length, args: {target: 20, limit: 40}}, {function: number_match}]"]
    code, told, _ = planned(capsys, given + more)
    assert code == 0 and told["runnable"] is True and told["errors"] == [], told
    assert trained(project, given + more) is None


def test_a_reward_function_with_yield_is_refused_before_it_is_called(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A call of it makes a generator: its body would never run, and no completion be graded."""
    own = project / "own.py"
    given = ["reward.functions=[{function: own.py:mark}]"]
    own.write_text(f"def mark({HEAD}):\n    if fields:\n        yield 1.0\n")
    code, told, _ = planned(capsys, given)
    refused = trained(project, given)
    assert code == 2 and refused is not None and "'mark' is a generator: it has `yield`" in refused
    assert refused.splitlines()[0] in str(told["errors"]).replace("\\'", "'")
    own.write_text(f"def mark({HEAD}):\n    def parts():\n        yield 1.0\n    return sum(parts())\n")
    code, told, _ = planned(capsys, given)
    assert code == 0 and told["runnable"] is True and trained(project, given) is None
