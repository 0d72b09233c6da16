"""Paths of the files that a script sources and starts, held against bash itself (2 s).

It would catch a file whose BASH_SOURCE or $0 is taken for the first script's: models and data of another folder.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gspo_hpc.importers.convert import convert

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
