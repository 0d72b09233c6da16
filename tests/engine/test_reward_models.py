"""An engine of a reward model on the CPU: its numbers are those of transformers, whatever else is in the batch.

It takes about half a minute, for two starts of an engine. It would catch a sigmoid on the logit, a model that scores
padding, scores that depend on the batch or reach the wrong sequences, and an engine that comes back with other weights.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo_hpc.engine.engine import EngineDied, EngineSettings
from gspo_hpc.engine.scoring.classifier import Classifier

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
