"""Completions of an evaluation that are kept while it goes on: one that was killed samples and grades only the rest.

A folder has them, with a journal for the greedy ones and one for samples, as a rollout has. It belongs to one
checkpoint, or model, and to the settings that decide what a completion and its grade are; with others the evaluation
begins anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from pathlib import Path

from gspo_hpc.config.reading import own_code
from gspo_hpc.config.schema import Config, as_dict
from gspo_hpc.data.records import Group
from gspo_hpc.evaluation.evaluate import CompletionSource
from gspo_hpc.policy.process_groups import Ranks
from gspo_hpc.rollout.generation import Request
from gspo_hpc.rollout.worker import Generated
from gspo_hpc.runs import commit, journal
from gspo_hpc.system.files import make_inner_dir, open_private, remove_tree

Sample = Callable[[Request, journal.Journal], Generated]  # grade and keep in a journal what is asked for

UNFINISHED = "unfinished"  # the folder of a run's evaluations for those that go on
_DECIDING = ("model", "adapter", "data", "rollout", "reward", "judges", "environment", "sandbox", "eval")


def fingerprint(config: Config, checkpoint: Path | None) -> str:
    """Return the hash of what decides the completions and their grades: weights, settings, code of graders."""
    weights = config.model.path if checkpoint is None else checkpoint
    seen = [
        (path.name, path.stat().st_size, None if checkpoint else path.stat().st_mtime_ns)
        for path in sorted(Path(str(weights)).iterdir())
        if path.is_file()
    ]
    named = [term.function for term in config.reward.functions]
    named += [str(config.environment.name or ""), *(str(tool.function) for tool in config.environment.tools)]
    code = map(own_code.file_of, named)
    told = {
        "weights": seen,
        "checkpoint": None if checkpoint is None else (checkpoint / commit.COMMITTED).read_text(),
        "settings": {name: as_dict(getattr(config, name)) for name in _DECIDING},
        "seed": config.run.seed,
        "code": [None if path is None else own_code.source(path).read_text() for path in code],
    }
    return hashlib.blake2b(json.dumps(told, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


class KeptCompletions:
    """A source of completions that gives those again which are kept in a folder."""

    def __init__(self, ranks: Ranks, sample: Sample, folder: Path, found: str, remark: Callable[[str], None]) -> None:
        """`found`: the fingerprint; `remark` gets a line for the user where an evaluation goes on."""
        self.ranks = ranks
        self._sample, self._folder, self._fingerprint, self._remark = sample, folder, found, remark

    def generate(self, request: Request) -> Generated:
        """Sample and grade completions of every prompt of which none are kept."""
        how = "-".join(f"{value:g}" for value in astuple(request.sampling))
        folder = self._folder / f"{request.samples}-{how}"
        known = {
            slot: group
            for slot, group in journal.read_journals(folder, self._fingerprint).items()
            if slot in request.slots and self._fits(group, request)
        }
        if known:
            self._remark(f"going on: {len(known)} of {len(request.slots)} prompts were answered before the last stop")
        rest = replace(request, slots=[slot for slot in request.slots if slot not in known])
        if not rest.slots:
            return Generated(known, {}, 0.0)
        writer = journal.Journal(
            folder, self.ranks.rank, fingerprint=self._fingerprint, rollout=max(0, request.rollout)
        )
        try:
            generated = self._sample(rest, writer)
        finally:
            writer.close()
        return replace(generated, own=known | generated.own)

    @staticmethod
    def _fits(group: Group, request: Request) -> bool:
        prompt = request.prompts[group.slot]
        same = group.prompt.tokens.tolist() == prompt.tokens.tolist() and group.prompt.fields == prompt.fields
        return same and len(group.completions) == request.samples


@contextlib.contextmanager
def keeping(
    source: CompletionSource, sample: Sample, folder: Path | None, found: str, remark: Callable[[str], None]
) -> Iterator[CompletionSource]:
    """Give a source that keeps what it samples in `folder`, and remove the folder at the end.

    Give `source` itself where nothing is to be kept, or nothing can be. RuntimeError if another process fills the
    folder now.
    """
    with contextlib.ExitStack() as stack:
        if folder is not None:
            try:
                make_inner_dir(folder)
                lock = open_private(folder / "lock", os.O_RDWR | os.O_CREAT)
            except OSError as error:  # somebody else's run
                remark(f"a stop would lose what is sampled: {error.filename}: {error.strerror}")
                folder = None
            else:
                stack.callback(os.close, lock)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise RuntimeError(f"another process makes this evaluation now, and keeps it in {folder}") from None
                except OSError:
                    pass  # a file system without locks
        yield source if folder is None else KeptCompletions(source.ranks, sample, folder, found, remark)
        if folder is not None:
            remove_tree(folder)
            if folder.parent.name == UNFINISHED:
                with contextlib.suppress(OSError):  # others are in it
                    folder.parent.rmdir()
