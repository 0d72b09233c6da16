"""Count how many public scripts of other projects ``gspo-hpc convert`` converts, refuses, or leaves arguments open in.

FOLDER holds checkouts, each named as in the first column; those that are not there are left out:

    git clone --branch v0.9.0 --depth 1 https://github.com/verl-project/verl FOLDER/verl

`--set second` reads the checkouts that second_checkouts.yaml lists, each at its commit, and `--set every` every folder
in FOLDER: all files with words of a launch, of those with the same text the first. Files are read, never run.
`--half judge` keeps the half of the files of the first set, by a hash of their paths, by which the converters were not
changed; `--sample N` names N converted files at random, to be read by hand beside what they are converted to.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import random
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gspo_hpc.config import yaml_text
from gspo_hpc.importers.convert import convert
from gspo_hpc.planning.plan import make_plan


@dataclass(frozen=True)
class Checkout:
    """Places and patterns of the runs in a checkout."""

    folders: tuple[str, ...]
    files: str  # pattern of their names
    texts: str  # pattern that a run has in its text
    project: str = ""  # of which every file is refused, by this name
    commit: str = ""  # what is checked out, where it is not a clone with its own history
    most: int = 10**6  # so many runs, the first by a hash of their places
    of: str = ""  # the project whose runs are in it, where rows are summed up by project
    code: str = ""  # pattern of the text of a Python file that is a run, where it is another


_RL = r"GRPO|RLOO|trl grpo|gspo\.py|grpo\.py"
_OTHER = r"\.(sh|ya?ml|toml)$"
CHECKOUTS = {
    "verl": Checkout(("examples", "recipe", "verl/experimental"), r"\.sh$", r"python3? .*-m|main_"),
    "verl-0.7": Checkout(("examples", "recipe"), r"\.sh$", r"python3? .*-m|main_"),
    "verl-recipe": Checkout((".",), r"\.sh$", r"python3? .*-m|main_"),
    "ms-swift": Checkout(("examples",), r"\.(sh|ya?ml)$", r"rlhf_type"),
    "trl": Checkout(("examples/scripts", "docs/source", "trl/scripts"), r"\.(py|md)$", _RL),
    "open-r1": Checkout(("recipes", "src/open_r1", "README.md"), r"\.(ya?ml|py|md)$", _RL + r"|num_generations"),
    "NeMo-RL": Checkout(("examples",), _OTHER, r"policy|run_", "NeMo-RL"),
    "slime": Checkout(("scripts", "examples"), _OTHER, r"train(_async)?\.py", "slime"),
    "OpenRLHF": Checkout(("examples",), _OTHER, r"openrlhf", "OpenRLHF"),
    "prime-rl": Checkout(("configs", "examples"), r"\.toml$", r"", "prime-rl"),
    "AReaL": Checkout(("examples",), _OTHER, r"areal|trial_name", "AReaL"),
    "SkyRL": Checkout(("examples", "skyrl-train"), _OTHER, r"skyrl", "SkyRL"),
    "ROLL": Checkout(("examples",), _OTHER, r"actor_train|_pipeline\.py", "ROLL"),
    "open-instruct": Checkout(("configs", "scripts"), _OTHER, r"open_instruct|checkpointing_steps", "open-instruct"),
}
_LAUNCH = r"main_\w*(ppo|dapo)|rlhf_type[ =]+['\"]?grpo|trl grpo|grpo\w*\.py|GRPOConfig\(|num_generations"

# Words of a launch in a file of any checkout; and what makes TRL's config or trainer, without what defines these.
_ANY_LAUNCH = (
    r"main_\w*(ppo|dapo|grpo)|rlhf_type|trl grpo|grpo\w*\.py|GRPOConfig\(|num_generations|verl\.trainer|adv_estimator|"
    r"train_grpo|trl vllm-serve|swift rlhf|grpo_train"
)
_ANY_CODE = r"(?s)^(?!.*class GRPO(Trainer|Config)).*GRPO(Config|Trainer)\("


def every_checkout(folder: Path) -> dict[str, Checkout]:
    """Return all folders in a folder as checkouts, of which every file with words of a launch counts."""
    return {
        path.name: Checkout(
            (".",), r"\.(sh|bash|slurm|sbatch|ya?ml|py)$", _ANY_LAUNCH, code=_ANY_CODE, of="every checkout"
        )
        for path in sorted(folder.iterdir())
        if path.is_dir()
    }


def second_set() -> dict[str, Checkout]:
    """Return the checkouts of the second set."""
    raw = yaml_text.read_shipped(Path(__file__).with_name("second_checkouts.yaml").read_text(encoding="utf-8"))
    return {
        name: Checkout(
            tuple(item["folders"]),
            item.get("files", r"\.(sh|slurm)$"),
            _LAUNCH,
            commit=item["commit"],
            most=item.get("most", 6),
            of=item["of"],
        )
        for name, item in raw.items()
    }


class Run(NamedTuple):
    """One run of a checkout: a file, or a block of code in a page."""

    place: str  # the file, below FOLDER, and the line of a block in it
    folder: Path
    name: str
    text: str


class Outcome(NamedTuple):
    """Fate of one run."""

    place: str
    kind: str
    text: str  # the error, the arguments that are left open, or what became of how many
    plans: bool = False  # the planner accepts the config as it is
    strange: bool = False  # it has arguments that are not known as the project's


def runs(folder: Path, checkout: str, about: Checkout) -> Iterator[Run]:
    """Yield the runs of a checkout."""
    root = folder / checkout
    paths = sorted({path for part in about.folders for path in _files(root / part)})
    for path in paths:
        if not re.search(about.files, path.name):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        place = path.relative_to(folder).as_posix()
        if path.suffix != ".md":
            if re.search(about.code if about.code and path.suffix == ".py" else about.texts, text):
                yield Run(place, path.parent, path.name, text)
            continue
        for match in re.finditer(r"^( *)```(?:python|bash|sh|shell|yaml)\n(.*?)^\1```", text, re.DOTALL | re.MULTILINE):
            block = re.sub(rf"(?m)^{match[1]}", "", match[2])
            if re.search(_RL, block):
                yield Run(f"{place}:{text.count(chr(10), 0, match.start()) + 1}", path.parent, "", block)


def _files(part: Path) -> Iterator[Path]:
    yield from [part] if part.is_file() else (path for path in part.rglob("*") if path.is_file())


def outcome(run: Run) -> Outcome:
    """Convert a run."""
    try:
        found = convert(run.text, folder=run.folder, name=run.name)
    except ValueError as error:
        return Outcome(run.place, "refused", str(error).splitlines()[0])
    except Exception as error:  # a fault of ours: it is counted, and the others go on
        return Outcome(run.place, "fault", f"{type(error).__name__}: {error}")
    plans = make_plan(found.config).valid
    strange = bool(found.strange)
    if found.open:
        return Outcome(run.place, "open", "; ".join(found.open), plans, strange)
    told = f"{len(found.carried)} carried over, {len(found.left)} not" + f", {len(found.strange)} not known" * strange
    return Outcome(run.place, "exact", told, plans, strange)


def first_of(found: list[Run], most: int) -> list[Run]:
    """Return `most` of the runs, the same ones each time and from all folders."""
    chosen = sorted(found, key=lambda run: hashlib.md5(run.place.encode()).hexdigest())[:most]
    return sorted(chosen)


def version(root: Path) -> str:
    """Return what git calls the commit of a checkout."""
    command = ["git", "-C", str(root), "describe", "--tags", "--always"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if (root / ".git").exists() and done.returncode == 0 else "no git checkout"


def half_of(place: str) -> str:
    """Return the half that a file belongs to."""
    return "judge" if hashlib.md5(place.partition(":")[0].encode()).hexdigest()[0] in "89abcdef" else "tune"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--set", choices=["first", "second", "every"], default="first", help="of checkouts")
    parser.add_argument("--half", choices=["tune", "judge"], help="only the files of this half")
    parser.add_argument("--only", metavar="NAME", help="only this checkout")
    parser.add_argument("--plans", action="store_true", help="also count the configs that plan accepts as they are")
    parser.add_argument(
        "--unknown", action="store_true", help="also count exact runs with arguments that are not known"
    )
    parser.add_argument("--list", action="store_true", help="also print what became of every run")
    parser.add_argument("--sample", type=int, metavar="N", help="also name N runs that are converted, at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    args = parser.parse_args()
    print("| checkout | version | runs | exact | open | refused | refused by its name |\n|---|---|---|---|---|---|---|")
    everything: list[Outcome] = []
    sums: dict[str, collections.Counter[str]] = {}
    sets = {"first": CHECKOUTS, "second": second_set()}
    texts = set[str]()  # of files that are counted
    for checkout, about in (sets.get(args.set) or every_checkout(args.folder)).items():
        if not (args.folder / checkout).is_dir() or args.only not in (None, checkout):
            continue
        given = [run for run in runs(args.folder, checkout, about) if args.half in (None, half_of(run.place))]
        given = first_of(given, about.most)
        if args.set == "every":  # forks hold the same files
            given = [*{run.text: run for run in reversed(given) if run.text not in texts}.values()][::-1]
            texts |= {run.text for run in given}
        found = [outcome(run) for run in given]
        everything += found
        counts = collections.Counter(item.kind for item in found)
        sums.setdefault(about.of, collections.Counter()).update(counts)
        named = sum(f"run of {about.project}," in item.text for item in found) if about.project else "–"
        cells = [checkout, about.commit or version(args.folder / checkout), len(found), counts["exact"], counts["open"],
                 counts["refused"], named]  # fmt: skip
        print("| " + " | ".join(map(str, cells)) + " |")
        for item in found:
            if item.kind == "fault":
                print(f"FAULT {item.place}: {item.text}")
    for project, counts in sums.items():
        if project:
            cells = [f"all of {project}", "", counts.total(), counts["exact"], counts["open"], counts["refused"], "–"]
            print("| " + " | ".join(map(str, cells)) + " |")
    if args.plans:
        converted = [item for item in everything if item.kind in ("exact", "open")]
        print(f"{sum(item.plans for item in converted)} of {len(converted)} configs are accepted by plan as they are")
    if args.unknown:
        exact = [item.strange for item in everything if item.kind == "exact"]
        print(f"{sum(exact)} of {len(exact)} exact runs have arguments that are not known as their project's")
    for item in everything if args.list else ():
        print(f"{item.kind}\t{item.place}\t{item.text}")
    if args.sample:
        done = sorted(item.place for item in everything if item.kind in ("exact", "open"))
        for place in sorted(random.Random(args.seed).sample(done, min(args.sample, len(done)))):
            print(place)


if __name__ == "__main__":
    main()
