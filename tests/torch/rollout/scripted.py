"""Conversations with tools over an engine that says what a script has, for tests in this process and for one to kill.

In a process of its own, :func:`serve` leads the conversations of a rollout with a journal in a folder, and writes their
groups beside it. The tools note each call that they take.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config, Data
from gspo_hpc.data.prompts import build_prompts
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.data.replies import Replies
from gspo_hpc.data.rows import Row
from gspo_hpc.engine.engine import Sampling
from gspo_hpc.rewards.environments import registry, tools
from gspo_hpc.rewards.environments.tools import Toolbox
from gspo_hpc.rewards.environments.turns import turn_pool
from gspo_hpc.rewards.pool import RewardPool
from gspo_hpc.rollout.conversations import Conversations
from gspo_hpc.runs.journal import Journal

# Tools before the messages, and the results of a message's calls in one message of the user, as Qwen's template.
TEMPLATE = (
    "{% if tools %}<|system|>{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "<tool_call>JSON</tool_call><|end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|user|>{% endif %}<result>{{ m.content }}</result>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|end|>{% endif %}"
    "{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<bos>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<tool_call>", "</tool_call>"]
FILE = """
import random
import time


def add(a: int, b: int, *, asked: str, fields) -> str:
    '''Add two numbers.'''
    with open(asked, "a") as file:
        file.write("asked\\n")
    time.sleep(0.02)
    if b == 13:
        raise RuntimeError("an unlucky number")
    if b == 14:
        time.sleep(60)
    return f"{a + b} for {fields['who']} ({random.SystemRandom().random()})"


class Critic:
    def step(self, state, message):
        if not state:
            return {"reply": "Are you sure?", "reward": 0.25, "state": {"asked": True}}
        return {"reward": 0.5, "over": True}
"""

MOODY = """
import random
import time

chance = random.SystemRandom()


class Moody:
    # Fails for one message in five, and scores groups by chance, once in four with an error.

    def __init__(self, asked):
        self.asked = asked

    def note(self, what):
        with open(self.asked, "a") as file:
            file.write(what + "\\n")
        time.sleep(0.02)

    def step(self, state, message):
        self.note("step")
        if chance.random() < 0.2:
            raise RuntimeError(f"a mood of {chance.random()}")
        return {"reply": "Go on.", "reward": 1.0, "state": {"turn": state.get("turn", 0) + 1}}

    def score_group(self, fields, conversations):
        self.note("score")
        if chance.random() < 0.25:
            raise RuntimeError(f"a mood of {chance.random()}")
        return [one["reward"] + one["state"]["turn"] + chance.random() for one in conversations]
"""


def tokenizer() -> Any:
    """Return a tokenizer of one token a byte, for which the tags of calls are special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([*SPECIAL, *alphabet])}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", additional_special_tokens=SPECIAL[1:])
    made.chat_template = TEMPLATE
    return made


class Scripted:
    """The part of an engine that conversations use; `says` gives a message for what the model sees and a seed."""

    def __init__(self, made: Any, says: Callable[[str, int], str]) -> None:
        self._tokenizer, self._says = made, says
        self._open: list[tuple[int, Prompt, list[int], Sampling]] = []
        self.tokens_generated = 0
        self.seen: list[str] = []
        self.waited = 0.0  # seconds in which only tools or the environment were waited for

    @property
    def pending(self) -> int:
        return len(self._open)

    running = pending

    def submit(
        self,
        slot: int,
        prompt: Prompt,
        seeds: Sequence[int],
        sampling: Sampling,
        *,
        reports_experts: bool = False,
        begun: Sequence[Completion] = (),
        may_stop: bool = False,
    ) -> None:
        assert not begun
        self._open.append((slot, prompt, list(seeds), sampling))

    def step(self) -> list[Group]:
        slot, prompt, seeds, sampling = self._open.pop(0)
        self.seen.append(self._tokenizer.decode(prompt.tokens))
        completions = []
        for seed in seeds:
            text = self._says(self.seen[-1], seed)
            tokens = self._tokenizer(f"{text}<|end|>", add_special_tokens=False)["input_ids"][: sampling.max_tokens]
            whole = len(tokens) < sampling.max_tokens
            plain = self._tokenizer.decode(tokens, skip_special_tokens=True)
            array = np.asarray(tokens, np.int32)
            completions.append(
                Completion(array, np.full(len(array), -0.5, np.float32), plain, "stop" if whole else "length", seed)
            )
            self.tokens_generated += len(tokens)
        return [Group(slot, prompt, tuple(completions))]

    def abort(self) -> None:
        self._open.clear()


def call(**arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': 'add', 'arguments': arguments})}</tool_call>"


def settings(folder: Path, *more: str) -> Config:
    """Return a config with the tool of :data:`FILE`, which lies in the folder then."""
    file = folder / "own.py"
    file.write_text(FILE)
    tool = f"{{function: '{file}:add', args: {{asked: '{folder / 'asked'}'}}}}"
    return loader.load(None, [f"environment.tools=[{tool}]", "environment.workers=2", *more], run_code=True)


def talk(
    config: Config,
    pool: RewardPool,
    says: Callable[[str, int], str],
    *,
    questions: int = 1,
    samples: int = 1,
    journal: Journal | None = None,
    room: int = 2000,
) -> tuple[dict[int, Group], Scripted]:
    """Return the groups of conversations by slot, and the engine that led them."""
    made = tokenizer()
    engine, shown, environment = Scripted(made, says), tools.shown(config.environment), config.environment
    rows = [Row(n, f"rows:{n}", f"Question {n}", {"who": f"you {n}"}) for n in range(questions)]
    conversations = Conversations(
        engine,  # type: ignore[arg-type]
        pool,
        Replies(made, Data(), shown, users=environment.name is not None),
        environment.max_turns,
        environment.max_seconds,
        slots=range(questions),
        journal=journal,
        toolbox=Toolbox.of(environment, TEMPLATE),
        answers=environment.name is not None,
        scores_groups=registry.scores_groups(environment),
    )
    for slot, prompt in enumerate(build_prompts(rows, made, Data(), 2000, tools=shown)):
        seeds = [1000 * slot + sample for sample in range(samples)]
        conversations.submit(slot, prompt, seeds, Sampling(temperature=1.0, max_tokens=room))
    groups, deadline = {}, time.monotonic() + 60
    while conversations.pending:
        assert time.monotonic() < deadline
        for group in conversations.step():
            groups[group.slot] = group
    engine.waited = conversations.waited()
    return groups, engine


def rambling(seen: str, seed: int) -> str:
    """Call once or twice in each of five messages, one of them wrongly; what came of it decides what comes next."""
    turns = seen.count("<|assistant|>")
    if turns > 5:
        return f"Done, with {seen.count('Error')} errors."
    other = call(a=turns, b=13) if (seed + turns) % 3 == 0 else "<tool_call>{</tool_call>" * (seed % 2)
    return f"Message {turns} to {seen[-60:].count('1')}." + call(a=seed, b=turns) + other


def moody_settings(folder: Path) -> Config:
    """Return a config with the environment Moody, which lies in the folder then."""
    file = folder / "moody.py"
    file.write_text(MOODY)
    words = [f"environment.name={file}:Moody", f"environment.args={{asked: '{folder / 'asked'}'}}"]
    return loader.load(None, [*words, "environment.workers=2", "environment.max_turns=5"], run_code=True)


def chatting(seen: str, seed: int) -> str:
    """Say something that depends on the turn."""
    return f"Message {seen.count('<|assistant|>')}."


def main(folder: Path, *, moody: bool) -> None:
    """Lead the conversations of a rollout; those of a journal that is there go on."""
    config = moody_settings(folder) if moody else settings(folder)
    with turn_pool(config, 1) as pool:
        journal = Journal(folder / "000000", 0, fingerprint="f", rollout=0)
        groups, _ = talk(config, pool, chatting if moody else rambling, questions=4, samples=4, journal=journal)
        journal.close()
    text = "".join(f"{groups[slot].to_json()}\n" for slot in sorted(groups))
    (folder / "groups").write_text(text)


def serve(folder: Path, *, moody: bool) -> None:
    """Run :func:`main` in a child for each line of standard input, and write its process id: imports take long."""
    for _ in sys.stdin:
        if (pid := os.fork()) == 0:
            os.setsid()
            main(folder, moody=moody)
            os._exit(0)
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)


def groups_of(folder: Path) -> list[dict[str, Any]]:
    """Return the groups that a process of :class:`Child` wrote."""
    return [json.loads(line) for line in (folder / "groups").read_text().splitlines()]


class Child:
    """A process that leads the conversations once for each call, of tools or of the environment Moody."""

    def __init__(self, folder: Path, *, moody: bool = False) -> None:
        # With -c, processes that it spawns do not import the module again.
        arguments = f"Path({str(folder)!r}), moody={moody}"
        program = f"from pathlib import Path; from tests.torch.rollout import scripted; scripted.serve({arguments})"
        command = [sys.executable, "-c", program]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, until: Callable[[], bool] = lambda: False) -> int:
        """Return how the child ended, which is killed as soon as `until` holds."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        pid = int(self._process.stdout.readline())
        ended: list[str] = []
        reader = threading.Thread(target=lambda: ended.append(self._process.stdout.readline()))  # type: ignore[union-attr]
        reader.start()
        deadline = time.monotonic() + 120
        while reader.is_alive():
            assert time.monotonic() < deadline
            if until():
                os.killpg(pid, signal.SIGKILL)
                break
            time.sleep(0.001)
        reader.join(30)
        return int(ended[0])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
