"""Engines of reward models on the CPU: numbers are those of transformers, whatever else is in the batch.

It takes about a minute, for four starts of an engine. It would catch a sigmoid on the logit, a model that scores
padding, scores that depend on the batch or reach the wrong sequences or completions, and an engine that comes back with
other weights.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gspo_hpc.config.schema import RewardModel
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.engine.engine import Engine, EngineDied, EngineSettings, Sampling
from gspo_hpc.engine.scoring.classifier import Classifier
from gspo_hpc.engine.scoring.reading import Reader
from gspo_hpc.rollout.scoring import ScoringEngine

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ("5", "What is 3 + 4?", "3 + 4 = 7", "z" * 60, "3 + 4 = 8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = importlib.util.spec_from_file_location("make_random_model", ROOT / "tools" / "make_random_model.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    made: Path = tool.make_random_model(tmp_path_factory.mktemp("reward") / "model", "llama", classifies=True)
    return made


@pytest.fixture(scope="module")
def classifier(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Classifier]:
    log = tmp_path_factory.mktemp("log") / "engine.log"
    made = Classifier(
        EngineSettings(
            str(folder), max_model_len=128, kv_cache_gb=0.03, threads=2, log_path=log, timeout=60.0, classifies=True
        )
    )
    made.start()
    yield made
    made.close()


@pytest.fixture(scope="module")
def sequences(folder: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer(text)["input_ids"] for text in TEXTS]


def test_scores_are_those_of_transformers(classifier: Classifier, folder: Path, sequences: list[list[int]]) -> None:
    from transformers import AutoModelForSequenceClassification

    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = [model(torch.tensor([tokens])).logits.item() for tokens in sequences]
    assert classifier.score(sequences) == pytest.approx(expected, abs=1e-4)
    assert max(expected) - min(expected) > 0.5  # else nothing would tell them apart


def test_padding_at_the_end_is_not_scored(classifier: Classifier, folder: Path) -> None:
    """A template that ends with the token that pads: transformers scores the token before it."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    template = "{% for m in messages %}{{ m['content'] }}<pad>{% endfor %}"
    model = RewardModel(name="rm", path=str(folder), chat_template_kwargs={"chat_template": template})
    prompt = Prompt(0, np.zeros(1, np.int32), "unused", {"prompt_messages": [{"role": "user", "content": "3 + 4"}]})
    tokens = Reader.of(model, 128).tokens(prompt, "7")
    whole = AutoTokenizer.from_pretrained(folder)("3 + 4<pad>7<pad>", add_special_tokens=False)["input_ids"]
    assert tokens == whole[:-1] and 0 in tokens
    network: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = network(torch.tensor([whole])).logits.item()
    assert classifier.score([tokens]) == pytest.approx([expected], abs=1e-4)
    assert abs(classifier.score([whole])[0] - expected) > 0.01


def test_a_score_is_the_same_bit_for_bit_alone_and_in_any_batch(
    classifier: Classifier, sequences: list[list[int]]
) -> None:
    together = classifier.score(sequences)
    assert classifier.score(sequences[::-1]) == together[::-1]
    assert [classifier.score([tokens])[0] for tokens in sequences] == together
    many = classifier.score([tokens for tokens in sequences for _ in range(9)])
    assert many == [score for score in together for _ in range(9)]


def test_an_engine_that_died_comes_back_with_its_weights(classifier: Classifier, sequences: list[list[int]]) -> None:
    before = classifier.score(sequences)
    os.kill(classifier.pids()[0], signal.SIGKILL)
    with pytest.raises(EngineDied):
        classifier.score(sequences)
    classifier.restart()
    assert classifier.score(sequences) == before


def test_a_generative_model_is_asked_for_each_completion(model_path: Path, settings: EngineSettings) -> None:
    """The random model says what it likes: the score is in what it says greedily to the message of each completion."""
    model = RewardModel(
        name="judge",
        kind="generative",
        path=str(model_path),
        template="{prompt} {completion} {level}",
        pattern=r"(?s)^(.)",  # its first character, which is no number for most messages
        max_reply_length=8,
    )
    engine = Engine(replace(settings, loads_weights=True))
    engine.start()
    one = ScoringEngine(engine, Reader.of(model, 128))
    prompt = Prompt(0, np.zeros(1, np.int32), "3 + 4 =", {"level": "easy"})
    groups = [group_of(3, prompt, ["7", "8", "x" * 200]), group_of(5, prompt, [str(number) for number in range(12)])]
    found = dict(one.scores(groups))
    assert sorted(found) == [3, 5] and [len(scores) for scores in found.values()] == [3, 12]
    assert isinstance(found[3][2], str) and "the model reads 120 at most" in found[3][2]

    for index, text in ((0, "7"), (1, "8")):  # asked by hand
        message = [{"role": "user", "content": f"3 + 4 = {text} easy"}]
        tokenizer = one.reader.tokenizer
        words = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        tokens = np.asarray(tokenizer(words, add_special_tokens=False)["input_ids"], np.int32)
        engine.submit(0, Prompt(0, tokens, "", {}), [0], Sampling(temperature=0.0, max_tokens=8))
        reply = ""
        while engine.pending:
            reply = next((done.completions[0].text for done in engine.step()), reply)
        score = found[3][index]
        assert score == float(reply[0]) if reply[:1].isdigit() else isinstance(score, str) and reply[0] in score

    os.kill(engine.pids()[0], signal.SIGKILL)
    with pytest.raises(EngineDied):
        list(one.scores(groups))
    engine.restart()
    assert dict(one.scores(groups)) == found
    engine.close()


def group_of(slot: int, prompt: Prompt, texts: Sequence[str]) -> Group:
    made = [Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), text, "stop", 0) for text in texts]
    return Group(slot, prompt, tuple(made))
