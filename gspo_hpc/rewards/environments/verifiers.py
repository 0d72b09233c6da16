"""Environments of the package `verifiers`, in a Python of their own: its dependencies conflict with those of a run.

`python` is the interpreter of a virtual environment in which verifiers (0.1.14 up to 0.2) and the environment are
installed. What the package keeps of a conversation is no JSON, so it stays there; the state here is what was said. A
process that has not led a conversation, as after a kill, leads it to its place, and fails where the environment then
answers otherwise than before. The model's messages are text: environments that offer tools by an API are refused.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo_hpc.rewards.environments import verifiers_side
from gspo_hpc.system.text import parse_json

FIELD = "verifiers"  # of a data row: what the package's own data has for it
_KEPT = 2000  # bytes of what the other Python printed last
_MOST_PRINTED = 1 << 20  # bytes, beyond which they are forgotten


class Verifiers:
    """An environment that `verifiers` loads by its name, such as one that `pip install` brought."""

    def __init__(self, id: str, python: str, args: Mapping[str, Any] | None = None) -> None:
        """Start the other Python; it loads the environment with the first question. Raises ValueError without one."""
        path = Path(python).expanduser()
        if not os.access(path, os.X_OK):
            raise ValueError(f"python is {python}: there is no such program")
        # -I: neither the current folder nor this Python's variables.
        self._command = [str(path), "-I", "-c", inspect.getsource(verifiers_side), id, json.dumps(dict(args or {}))]
        self._printed = tempfile.TemporaryFile("a+b")
        self._process = self._started()

    def reset(self, fields: dict[str, Any], seed: int) -> dict[str, Any]:
        """Begin with nothing said. Raises ValueError for a row that does not come from the environment."""
        if not isinstance(fields.get(FIELD), Mapping):
            raise ValueError(f"the data row has no field {FIELD!r}: make rows with python -m {__spec__.name}")
        return {"row": fields[FIELD], "said": [], "replies": []}

    def step(self, state: dict[str, Any], message: str) -> dict[str, Any]:
        """Have the package answer. Raises ValueError with what went wrong there."""
        said = [*state["said"], message]
        answer = self.ask({"row": state["row"], "said": said, "replies": state["replies"]})
        if "reply" in answer:
            replies = [*state["replies"], answer["reply"]]
            return {"reply": answer["reply"], "state": {**state, "said": said, "replies": replies}}
        found = {"reward": answer["reward"], "over": True}
        return found | ({"state": {**state, "said": said, "in_group": True}} if answer.get("in_group") else {})

    def score_group(self, fields: dict[str, Any], conversations: list[dict[str, Any]]) -> list[float]:
        """Return what the package's rubric gives conversations that it scores together, and the sums of all others.

        Those that the environment did not end, such as ones that were cut off, have no part in the group.
        """
        together = [one["state"] for one in conversations if one["state"].get("in_group")]
        if not together:
            return [one["reward"] for one in conversations]
        group = [{"said": one["said"], "replies": one["replies"]} for one in together]
        scores = iter(self.ask({"row": fields[FIELD], "group": group}))
        return [next(scores) if one["state"].get("in_group") else one["reward"] for one in conversations]

    def ask(self, asked: Mapping[str, Any]) -> Any:
        """Return the answer to a question. Raises ValueError with what went wrong there.

        Where the other Python has ended, this question has no answer, and the next one starts another Python.
        """
        if self._process.poll() is not None:
            self._process = self._started()
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(f"{json.dumps(asked)}\n".encode())
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            self._end()
            last = self._last_printed().strip().splitlines()
            raise ValueError(f"its Python has ended: {last[-1] if last else self._process.returncode}")
        if os.fstat(self._printed.fileno()).st_size > _MOST_PRINTED:
            self._printed.truncate(0)
        found = parse_json(line, finite=False)
        if "error" in found:
            raise ValueError(found["error"])
        return found["answer"]

    def close(self) -> None:
        """End the other Python."""
        self._end()
        self._printed.close()

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._printed)

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _last_printed(self) -> str:
        """Return what the other Python printed last."""
        file = self._printed.fileno()
        return os.pread(file, _KEPT, max(0, os.fstat(file).st_size - _KEPT)).decode(errors="replace")


def main(words: Sequence[str]) -> int:
    """Write the rows of an environment's data as JSONL, for data.train."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("id")
    parser.add_argument("file", type=Path)
    parser.add_argument("--python", required=True)
    parser.add_argument("--args", type=json.loads, default={})
    parser.add_argument("--rows", type=int, default=-1)
    given = parser.parse_args(words)
    environment = Verifiers(given.id, given.python, given.args)
    try:
        rows = environment.ask({"rows": given.rows})
    finally:
        environment.close()
    lines = []
    for row in rows:
        asked = row["prompt"]  # messages, or a text as from the user
        prompt = asked if isinstance(asked, str) else [{key: one[key] for key in ("role", "content")} for one in asked]
        answer = {"answer": row["answer"]} if "answer" in row else {}
        lines.append(json.dumps({"prompt": prompt, **answer, FIELD: row}, ensure_ascii=False))
    given.file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{len(lines)} rows in {given.file}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
