"""Paths of the files that a script sources and starts, held against bash itself (2 s).

It would catch a file whose BASH_SOURCE or $0 is taken for the first script's: models and data of another folder.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gspo_hpc.importers.convert import convert
from tests.unit.importers.in_bash import given_to_swift

RUN = "NPROC_PER_NODE=4 swift rlhf --rlhf_type grpo --num_generations 8 --per_device_train_batch_size 8"
HERE = '"$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"'
CASES: dict[str, dict[str, str]] = {
    "sourced from the folder above": {
        "scripts/run.sh": f'source "$(dirname "$0")/../env.sh"\n{RUN} --model "$ROOT/m" --dataset "$ROOT/d.jsonl"\n',
        "env.sh": f"export ROOT={HERE}\n",
    },
    "started from another folder": {
        "scripts/run.sh": 'D="$(cd "$(dirname "$0")" && pwd)"\nbash "$D/../lib/inner.sh"\n',
        "lib/inner.sh": f'A="$(cd "$(dirname "$0")" && pwd)"\nB={HERE}\n{RUN} --model "$A/m" --dataset "$B/d.jsonl"\n',
    },
    "by a function of a sourced file": {
        "scripts/run.sh": f'. "$(dirname "$0")/../lib/fn.sh"\nwhere\nC={HERE}\n'
        f'{RUN} --model "$F/m" --dataset "$C/d.jsonl"\n',
        "lib/fn.sh": f"where() {{\n  F={HERE}\n}}\n",
    },
    "sourced by a file that is started": {
        "scripts/run.sh": 'D="$(cd "$(dirname "$0")" && pwd)"\nbash "$D/../lib/inner.sh"\n',
        "lib/inner.sh": f'. "$(dirname "$0")/more/env.sh"\n{RUN} --model "$ROOT/m" --dataset "$OWN/d.jsonl"\n',
        "lib/more/env.sh": f'ROOT={HERE}\nOWN="$(cd "$(dirname "$0")" && pwd)"\n',
    },
}


@pytest.mark.parametrize("files", CASES.values(), ids=CASES)
def test_paths_are_those_that_bash_has(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in ({"LICENSE": "", "bin/swift": '#!/bin/bash\necho "$@"\n'} | files).items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "bin" / "swift").chmod(0o755)
    first = tmp_path / "scripts" / "run.sh"
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    done = subprocess.run(["bash", str(first)], env={"PATH": path}, capture_output=True, text=True, timeout=60)
    words = done.stdout.split()
    model, data = (words[words.index(option) + 1] for option in ("--model", "--dataset"))
    found = convert(first.read_text(), name=str(first))
    assert (found.config.model.path, found.config.data.train) == (model, data)


GRPO = "rlhf_type: grpo\nmodel: q\ndataset: a.jsonl\nnum_generations: 8\nlearning_rate: {}\n"
OF_TRL = "model_name_or_path: q\ndataset_name: d\nnum_generations: 8\nlearning_rate: {}\n"
OF_VERL = "defaults: [ppo_trainer, _self_]\nactor_rollout_ref: {{rollout: {{n: 8}}, actor: {{optim: {{lr: {}}}}}}}\n"
JSON = '{{"rlhf_type": "grpo", "model": "q", "dataset": "a", "num_generations": 8, "learning_rate": {}}}'
READING = [
    "swift rlhf --config c.yaml",
    "swift rlhf c.json",
    "trl grpo --config t.yaml",
    "python3 -m verl.trainer.main_ppo --config-path conf --config-name v algorithm.adv_estimator=grpo",
    "source e.sh; swift rlhf --rlhf_type grpo --model q --num_generations 8 --learning_rate $LR",
    "bash i.sh",
]


def folders(root: Path) -> None:
    """Have files of the same names in a folder and in one below it, with other rates."""
    texts = {"c.yaml": GRPO, "c.json": JSON, "t.yaml": OF_TRL, "conf/v.yaml": OF_VERL, "e.sh": "LR={}\n"}
    texts["i.sh"] = "swift rlhf --rlhf_type grpo --model q --num_generations 8 --learning_rate {}\n"
    for folder, rate in ((root, "9e-6"), (root / "s", "8e-6"), (root / "s" / "t", "7e-6"), (root / "t", "6e-6")):
        for name, text in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text.format(rate))


@pytest.mark.parametrize("reading", READING)
def test_no_file_is_read_in_silence_in_a_folder_that_is_not_known(reading: str, tmp_path: Path) -> None:
    """One that a command names was: that beside the script, though bash reads the one in the folder of the commands."""
    folders(tmp_path)
    if "e.sh" in reading:
        assert convert(f"[ -d s ] && cd s; {reading}\n", folder=tmp_path, name="run.sh").open
    else:
        with pytest.raises(ValueError, match=r"may be any of 2 files: .* depends on a condition in line 1"):
            convert(f"[ -d s ] && cd s; {reading}\n", folder=tmp_path, name="run.sh")
    unknown = ["cd $(ls -d s)", "cd s*", "W=$(mktemp -d); cp s/* $W; cd $W", "CDPATH=s; cd t", "cd -", "cd ~/x"]
    for entering in (*unknown, "cd nope", "cd nope || exit 1", "cd nope &&", "cd /workspace/of/somebody"):
        text = f"{entering}{'' if entering.endswith('&&') else ';'} {reading}\n"
        found = convert(text, folder=tmp_path, name="run.sh")
        assert found.config.optimizer.lr == 9e-6
        (told,) = (line for line in found.assumed if " is read as it lies beside the script: " in line)
        assert ("is not at hand" in told) == (entering not in unknown), entering
    for known in ("cd s", "cd s/t/..", 'cd "$(dirname "$0")/s"', "pushd s"):
        found = convert(f"{known}; {reading}\n", folder=tmp_path, name="run.sh")
        assert found.config.optimizer.lr == 8e-6 and not any("as it lies" in line for line in found.assumed)


@pytest.mark.parametrize(
    "setting",
    ["PATH=$PWD/s:$PATH;", "export PATH=s:t:$PATH;", "cd s; PATH=/opt/x:t; cd ..;", "PATH=/opt/x:$PATH;", "PATH=s;"],
)
def test_a_bare_name_that_is_sourced_is_looked_for_in_path_first(setting: str, tmp_path: Path) -> None:
    folders(tmp_path)
    runs = "".join(f"{setting} . {name}; PATH={tmp_path}:/usr/bin; swift $LR; PATH=\n" for name in ("./e.sh", "e.sh"))
    read, told = given_to_swift(runs, tmp_path, {})
    assert read == told and len(told) == 2
