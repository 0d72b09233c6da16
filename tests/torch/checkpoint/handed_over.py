"""The process of its own that test_handed_over.py starts: save a checkpoint with one rank, and load many of them.

python -m tests.torch.checkpoint.handed_over save MODEL FOLDER         # prints how many signs of life a load gave
python -m tests.torch.checkpoint.handed_over load MODEL FOLDER ...     # prints what each load of each one raised
python -m tests.torch.checkpoint.handed_over save-adapters MODEL FOLDER        # and FOLDER-peft, in peft's format
python -m tests.torch.checkpoint.handed_over load-adapters MODEL FOLDER ...    # checkpoints, and folders of peft
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gspo_hpc.algorithms.terms.adaptive import AdaptiveWeights
from gspo_hpc.checkpoint import adapters, hugging_face, sharded
from gspo_hpc.checkpoint.saver import Saver
from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config, replace
from gspo_hpc.data.carried import Carried
from gspo_hpc.data.prompts import SourcePosition
from gspo_hpc.data.retired import PassRates, Retired, Retirement
from gspo_hpc.models import architecture
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.ops import peft_folder
from gspo_hpc.policy.policy import Policy
from gspo_hpc.policy.process_groups import start, stop
from gspo_hpc.runs import commit
from gspo_hpc.runs.cursor import Cursor
from gspo_hpc.system.progress import marks
from gspo_hpc.training.checkpoint_state import CheckpointState, SampledBy

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def save(policy: Policy, config: Config, folder: Path) -> None:
    """Make `folder` a whole checkpoint of step 1, with all files that one may have."""
    staging = commit.begin(folder.parent, 1)
    state = CheckpointState(
        *(Cursor(step=1), [], {"step": 1}),
        ahead={2: SampledBy("weights", 1)},
        weights=AdaptiveWeights(kl_beta=0.1, entropy_coef=0.0),
        teacher="weights",
        retired=Retired((Retirement(0, 1, 1.0),)),
        rates=PassRates({0: 0.5}),
        sources=(SourcePosition(1, 0, 1, ((0, 4),)),),
        carried=(Carried(0, 1),),
    )
    state.write(staging)
    Saver(policy, background=False).save(
        staging,
        lambda known: commit.commit(staging, 1, {"layout": config.layout}, known).rename(folder),
        lambda: state.write_groups(staging, 0),
    )


def from_peft(folder: Path, arch: Architecture, config: Config, out: Path) -> None:
    """Make a checkpoint of a folder of peft, as from-hf does."""
    out.mkdir()
    adapters.from_peft(arch, replace(config, adapter=peft_folder.settings(folder)), out)


def raised(work: Callable[[], object]) -> list[str] | None:
    """Return the kind and the text of what `work` raises; None if it does its work."""
    try:
        work()
    except BaseException as error:  # whatever it is: the test judges
        return [type(error).__name__, str(error)]
    return None


def main() -> None:
    """Do what the command line says, and print a JSON object of what was raised."""
    task, model, *names = sys.argv[1:]
    os.environ.update(ALONE)
    adapted = task.endswith("-adapters")
    config = from_dict(
        {
            "adapter": {"type": "lora", "rank": 4} if adapted else {},
            "cluster": {"platform": "cpu"},
            "model": {"path": model, "dtype": "float32"},
            "batch": {"global_batch_size": 4, "num_generations": 4, "micro_batch_tokens": 64},
            "run": {"max_steps": 10},
        }
    )
    arch, ranks = architecture.read(model), start(config)
    policy = Policy(arch, config, ranks)
    before = marks()[0]
    policy.load(model)
    signs = {"model": marks()[0] - before}
    policy.make_optimizer()
    said: dict[str, Any] = {}
    with contextlib.redirect_stdout(sys.stderr):
        for name in names:
            folder = Path(name)
            if task.startswith("save"):
                save(policy, config, folder)
                if adapted:
                    adapters.to_peft(folder / "megatron", arch, config, folder.with_name(f"{folder.name}-peft"))
                before = marks()[0]
                sharded.load(policy, folder)
                signs["checkpoint"] = marks()[0] - before
                said = signs | {"tensors": len(list(policy.parameters()))}
                continue
            out = folder.with_name(f"{folder.name}-hf")
            if not (folder / commit.MANIFEST).exists():
                said[folder.name] = {
                    "from-hf": raised(lambda folder=folder, out=out: from_peft(folder, arch, config, out))
                }
                continue
            more: dict[str, Any] = {}
            if adapted:
                write = adapters.to_hugging_face
                alone = folder.with_name(f"{folder.name}-alone")
                more["adapter"] = raised(
                    lambda folder=folder, alone=alone: adapters.to_peft(folder / "megatron", arch, config, alone)
                )
            else:
                write = hugging_face.to_hugging_face
            said[folder.name] = more | {
                "whole": commit.verify(folder),
                "resume": raised(lambda folder=folder: (sharded.load(policy, folder), CheckpointState.read(folder))),
                "evaluate": raised(lambda folder=folder: sharded.load_weights(policy, folder)),
                "export": raised(
                    lambda folder=folder, out=out, write=write: write(folder / "megatron", arch, config, out)
                ),
                "dtype": raised(lambda folder=folder: hugging_face.dtype_of(folder / "megatron")),
            }
    print(json.dumps(said))
    stop()


if __name__ == "__main__":
    main()
