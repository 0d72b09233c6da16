"""The engine against a real vLLM on the CPU: what it samples, what it does with weights, and how it dies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from gspo_hpc.data.records import Group, Prompt
from gspo_hpc.engine.engine import Engine, EngineDied, EngineSettings, Sampling
from gspo_hpc.engine.outputs import reported_experts
from gspo_hpc.ops.weight_parts import stream_of

EOS = 2
SAMPLING = Sampling(temperature=1.0, max_tokens=24)
LONG = Sampling(temperature=1.0, max_tokens=180)


def prompt(index: int) -> Prompt:
    """A prompt of 40 to 70 tokens, so longer than one block of the prefix cache and ending inside one."""
    generator = np.random.default_rng(index)
    tokens = generator.integers(4, 99, size=int(generator.integers(40, 70))).astype(np.int32)
    return Prompt(index, tokens, "", {})


def seeds(slot: int, samples: int = 4) -> list[int]:
    return [2**61 + 1000 * slot + sample for sample in range(samples)]


def collect(engine: Engine, limit: float = 240.0) -> dict[int, Group]:
    deadline = time.monotonic() + limit
    groups: dict[int, Group] = {}
    while engine.pending:
        assert time.monotonic() < deadline
        for group in engine.step():
            groups[group.slot] = group
    return groups


def generate(engine: Engine, slots: Sequence[int], sampling: Sampling = SAMPLING, samples: int = 4) -> dict[int, Group]:
    for slot in slots:
        engine.submit(slot, prompt(slot), seeds(slot, samples), sampling)
    return collect(engine)


def bits(groups: Mapping[int, Group]) -> dict[int, list[tuple[bytes, bytes, str, str, int]]]:
    return {
        slot: [(c.tokens.tobytes(), c.logprobs.tobytes(), c.text, c.finish_reason, c.seed) for c in group.completions]
        for slot, group in groups.items()
    }


def reference_logprobs(model: Any, tokens: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    """Log-prob of every token but the first, [len - 1], by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([list(tokens)])).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(list(tokens)[1:])[:, None])[:, 0].numpy()


def check_logprobs(group: Group, model: Any, temperature: float = 1.0) -> None:
    for completion in group.completions:
        tokens = [*group.prompt.tokens.tolist(), *completion.tokens.tolist()]
        expected = reference_logprobs(model, tokens, temperature)[len(group.prompt.tokens) - 1 :]
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-4)


def wait_gone(pids: Sequence[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
            return True
        time.sleep(0.05)
    return False


# ---- what it samples


@pytest.fixture(scope="module")
def baseline(engine: Engine) -> dict[int, Group]:
    return generate(engine, range(8))


def test_groups_are_whole_and_in_order(engine: Engine, baseline: dict[int, Group]) -> None:
    assert sorted(baseline) == list(range(8)) and engine.pending == 0
    for slot, group in baseline.items():
        assert [c.seed for c in group.completions] == seeds(slot)
        assert len({c.tokens.tobytes() for c in group.completions}) == 4  # each seed its own completion
        for completion in group.completions:
            assert completion.tokens.dtype == np.int32 and completion.logprobs.dtype == np.float32
            assert 0 < len(completion.tokens) == len(completion.logprobs) <= SAMPLING.max_tokens
    assert engine.tokens_generated == sum(len(c.tokens) for g in baseline.values() for c in g.completions)
    assert engine.step() == []


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_transformers(engine: Engine, reference: Any, temperature: float) -> None:
    groups = generate(engine, [20, 21], replace(SAMPLING, temperature=temperature))
    for group in groups.values():
        check_logprobs(group, reference, temperature)


def test_logprobs_of_a_cut_distribution_are_those_of_the_whole(settings: EngineSettings, reference: Any) -> None:
    """As the trainer measures them; renormalised to the four tokens that are left, they would be larger (10 s)."""
    with contextlib.closing(Engine(replace(settings, whole_distribution=True))) as whole:
        whole.start()
        for group in generate(whole, [20, 21], replace(SAMPLING, top_k=4, top_p=0.9)).values():
            check_logprobs(group, reference)
            for completion in group.completions:
                assert completion.logprobs.min() < -0.1


def test_prompt_logprobs_are_those_of_transformers(engine: Engine, reference: Any) -> None:
    sequences = [prompt(30).tokens.tolist(), prompt(31).tokens.tolist()[:2], prompt(30).tokens.tolist()]
    for _ in range(2):  # the second time, the prefix cache has them
        found = engine.prompt_logprobs(sequences)
        for tokens, logprobs in zip(sequences, found, strict=True):
            assert logprobs.dtype == np.float32 and len(logprobs) == len(tokens) - 1
            np.testing.assert_allclose(logprobs, reference_logprobs(reference, tokens), rtol=0, atol=1e-4)


def test_a_seed_gives_the_same_bits_in_any_company(engine: Engine, baseline: dict[int, Group]) -> None:
    expected = bits(baseline)
    assert bits(generate(engine, range(8))) == expected  # the prefix cache is warm now
    for slots in ([5], [7, 0, 3], range(1, 8)):
        assert bits(generate(engine, slots)) == {slot: expected[slot] for slot in slots}
    for slot in (2, 6):  # in the middle of others, and joining them late
        engine.submit(slot + 100, prompt(slot + 100), seeds(slot + 100, 9), LONG)
        for _ in range(5):
            engine.step()
        engine.submit(slot, prompt(slot), seeds(slot), SAMPLING)
        assert bits({slot: collect(engine)[slot]})[slot] == expected[slot]


def test_the_prefix_cache_is_emptied_in_the_middle_of_a_rollout_too(engine: Engine, baseline: dict[int, Group]) -> None:
    """vLLM by itself keeps it whole while a request runs; those that run are computed again, to the same bits."""
    for slot in (0, 1):
        engine.submit(slot, prompt(slot), seeds(slot), SAMPLING)
    groups = {group.slot: group for _ in range(6) for group in engine.step()}
    assert engine.running
    assert engine._llm("reset_prefix_cache") is False
    engine.reset_prefix_cache()
    expected = bits(baseline)
    assert bits(groups | collect(engine)) == {slot: expected[slot] for slot in (0, 1)}
    cached = [c.num_cached_tokens for c in baseline[0].completions]
    assert cached[1:] == [len(prompt(0).tokens) - 1] * 3, "the first of a group leaves its prompt for the others"
    tokens = prompt(0).tokens.tolist()
    whole = (len(tokens) - 1) // 32 * 32  # blocks, before the last token
    assert engine.cached_tokens(tokens) == whole
    engine.reset_prefix_cache()
    assert [engine.cached_tokens(tokens) for _ in range(3)] == [0, whole, whole]


def test_the_most_likely_tokens_have_the_log_probs_of_transformers(engine: Engine, reference: Any) -> None:
    tokens = prompt(30).tokens.tolist()
    (found,) = engine.top_logprobs([tokens], 5)
    with torch.no_grad():
        logprobs = reference(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    np.testing.assert_allclose(found, logprobs.topk(5, dim=-1).values.numpy(), rtol=0, atol=1e-4)


def test_greedy_has_no_use_for_seeds(engine: Engine) -> None:
    groups = generate(engine, [40], replace(SAMPLING, temperature=0.0), samples=3)
    assert len({c.tokens.tobytes() for c in groups[40].completions}) == 1


def test_the_end_token_is_kept_in_tokens_and_left_out_of_text(engine: Engine) -> None:
    completions = [c for g in generate(engine, range(50, 54), LONG, samples=8).values() for c in g.completions]
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for completion in completions:
        assert (completion.finish_reason == "stop") == (completion.tokens[-1] == EOS)
        assert EOS not in completion.tokens[:-1] and "</s>" not in completion.text
        assert (completion.finish_reason == "length") <= (len(completion.tokens) == LONG.max_tokens)


def test_abort_drops_everything_and_leaves_no_trace(engine: Engine, baseline: dict[int, Group]) -> None:
    for slot in range(3):
        engine.submit(slot, prompt(slot), seeds(slot), LONG)
    for _ in range(4):
        engine.step()
    engine.submit(3, prompt(3), seeds(3), LONG)
    engine.abort()
    assert engine.pending == 0 and engine.step() == []
    assert bits(generate(engine, [1, 2])) == {slot: bits(baseline)[slot] for slot in (1, 2)}


def test_a_prompt_that_is_too_long_is_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="prompt 7 has 250 tokens.* 274, and the engine takes at most 256"):
        engine.submit(0, Prompt(7, np.full(250, 5, np.int32), "", {}), [1], SAMPLING)
    assert engine.pending == 0


# ---- weights


def test_new_weights_count_and_old_ones_come_back_exactly(
    engine: Engine,
    baseline: dict[int, Group],
    weights: dict[str, torch.Tensor],
    other_weights: dict[str, torch.Tensor],
    reference: Any,
) -> None:
    tokens = prompt(60).tokens.tolist()
    before = engine.prompt_logprobs([tokens])[0]
    engine.update_weights(stream_of(reversed(other_weights.items())))  # in any order
    reference.load_state_dict(other_weights, strict=False)
    try:
        np.testing.assert_allclose(
            engine.prompt_logprobs([tokens])[0], reference_logprobs(reference, tokens), rtol=0, atol=1e-4
        )
        for slot, group in generate(engine, [0, 1]).items():  # their prompts were in the prefix cache
            assert bits({slot: group})[slot] != bits(baseline)[slot]
            check_logprobs(group, reference)
    finally:
        reference.load_state_dict(weights, strict=False)
    engine.update_weights(
        stream_of((name, tensor.t().contiguous().t()) for name, tensor in weights.items())
    )  # of any stride
    assert engine.prompt_logprobs([tokens])[0].tobytes() == before.tobytes()
    assert bits(generate(engine, [0, 1])) == {slot: bits(baseline)[slot] for slot in (0, 1)}


@pytest.mark.parametrize("level", [1, 2])
def test_nothing_is_computed_between_a_sleep_at_level_2_and_new_weights(
    level: int, engine: Engine, baseline: dict[int, Group], weights: dict[str, torch.Tensor]
) -> None:
    engine.sleep(level)
    engine.wake_up(["weights"])
    engine.wake_up()
    if level == 2:
        for refused in (lambda: engine.prompt_logprobs([[1, 2, 3]]), lambda: generate(engine, [0])):
            with pytest.raises(RuntimeError, match="started without weights or slept at level 2"):
                refused()
        engine.abort()
        engine.update_weights(stream_of(weights.items()))
    assert bits(generate(engine, [0])) == {0: bits(baseline)[0]}


def test_an_engine_that_reads_no_weights_computes_nothing_before_it_has_some(
    settings: EngineSettings, baseline: dict[int, Group], weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Starts an engine, about 12 seconds."""
    empty = Engine(replace(settings, loads_weights=False, log_path=tmp_path / "engine.log"))
    try:
        empty.start()
        with pytest.raises(RuntimeError, match="started without weights"):
            generate(empty, [0])
        empty.abort()
        empty.update_weights(stream_of(weights.items()))
        assert bits(generate(empty, [0, 1])) == {slot: bits(baseline)[slot] for slot in (0, 1)}
    finally:
        empty.close()


def test_experts_are_those_of_the_tokens_that_were_computed() -> None:
    """vLLM's CPU build tells none, so its answer is made by hand here: a row for all tokens but the last one."""
    rows = np.arange(6 * 2 * 2, dtype=np.uint8).reshape(6, 2, 2)
    answer = SimpleNamespace(token_ids=[7, 8, 9], routed_experts=rows)
    prompt, completion = reported_experts(answer, 4)
    assert np.array_equal(prompt, rows[:4]) and np.array_equal(completion, rows[4:])
    for told, text in ((None, "no experts"), (rows[:5], "the experts of 5 tokens")):
        with pytest.raises(RuntimeError, match=f"{text} where it computed 6; moe.router_replay=old_logprobs"):
            reported_experts(SimpleNamespace(token_ids=[7, 8, 9], routed_experts=told), 4)


def test_the_engine_lives_apart_from_its_owner(engine: Engine, settings: EngineSettings) -> None:
    (pid,) = engine.pids()
    assert os.getpgid(pid) == pid != os.getpgrp()
    environment = psutil.Process(pid).environ()
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} & environment.keys()
    assert environment["HF_HUB_OFFLINE"] == "1" and environment["VLLM_NO_USAGE_STATS"] == "1"
    for connection in psutil.Process(pid).net_connections("inet"):
        assert connection.laddr.ip.removeprefix("::ffff:") in ("127.0.0.1", "::1")
    assert settings.log_path is not None and settings.log_path.stat().st_mode & 0o777 == 0o600
    assert f"pid={pid}" in settings.log_path.read_text()  # vLLM's own lines
    assert not any("gspo" in name for name in os.listdir("/dev/shm"))


# ---- how it dies


def test_killed_in_the_middle_and_brought_back(
    engine: Engine, weights: dict[str, torch.Tensor], other_weights: dict[str, torch.Tensor]
) -> None:
    engine.update_weights(stream_of(other_weights.items()))  # not those that a restart finds on the disk
    expected = bits(generate(engine, range(4), LONG))
    for slot in range(4):
        engine.submit(slot, prompt(slot), seeds(slot), LONG)
    for _ in range(20):
        assert engine.step() == []
    (pid,) = engine.pids()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match=r"its process \d+ is gone"):
        collect(engine)
    assert engine.pids() == [] and engine.pending == 4
    with pytest.raises(EngineDied):
        engine.step()
    engine.restart()
    assert engine.pids() not in ([], [pid]) and engine.pending == 4
    engine.update_weights(stream_of(other_weights.items()))
    assert engine.step() == []  # nothing runs before it is asked for
    engine.resubmit()
    assert bits(collect(engine)) == expected
    engine.update_weights(stream_of(weights.items()))


def test_hung_and_brought_back(engine: Engine, baseline: dict[int, Group]) -> None:
    engine.submit(0, prompt(0), seeds(0), SAMPLING)
    engine.step()
    (pid,) = engine.pids()
    os.kill(pid, signal.SIGSTOP)
    patient, engine.settings = engine.settings, replace(engine.settings, timeout=2.0)
    began = time.monotonic()
    try:
        with pytest.raises(EngineDied, match="no answer for 2 s"):
            collect(engine)
    finally:
        engine.settings = patient
    assert time.monotonic() - began < 15
    assert wait_gone([pid], 5)
    engine.abort()  # of a dead engine: no error
    assert engine.pending == 0
    engine.restart()
    assert bits(generate(engine, [0])) == {0: bits(baseline)[0]}


def test_weights_of_another_model_leave_no_half_updated_engine(
    engine: Engine, weights: dict[str, torch.Tensor]
) -> None:
    taken: list[str] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for index, (name, tensor) in enumerate(weights.items()):
            taken.append(name)
            yield ("model.layers.0.mlp.wrong.weight" if index == 4 else name), tensor

    with pytest.raises(ValueError, match=r"the model has no weight 'model\.layers\.0\.mlp\.wrong\.weight'"):
        engine.update_weights(stream_of(stream()))
    assert taken == list(weights)  # the other ranks are not left alone in the collective
    assert engine.pids() == []
    with pytest.raises(EngineDied, match="a weight update failed"):
        engine.prompt_logprobs([[5, 6]])


def test_a_cache_that_the_node_has_no_memory_for_is_no_mistake_in_the_settings(settings: EngineSettings) -> None:
    """Catches that a restart beside a process that still ends gives up, or that a run is refused for it."""
    with pytest.raises(RuntimeError, match="vLLM did not start: ValueError: Available memory on node"):
        Engine(replace(settings, kv_cache_gb=1e5)).start()


def test_a_closed_engine_leaves_no_file_behind(settings: EngineSettings, tmp_path: Path) -> None:
    """vLLM keeps a file for its process group, and on GPUs sockets, in the folder for temporary files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path))
        made = Engine(settings)
        made.start()
        (pid,) = made.pids()
        made.close()
    assert not psutil.pid_exists(pid) and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": 3}, r"rollout\.engine\.seed cannot be given: it follows from run\.seed"),
        ({"max_num_sequences": 3}, r"refuses these settings:.*max_num_sequences"),
        ({"max_num_seqs": -1}, r"refuses these settings:.*SchedulerConfig"),
    ],
)
def test_wrong_settings_are_told_in_one_line(settings: EngineSettings, arguments: dict[str, Any], message: str) -> None:
    before = psutil.Process().children()
    with pytest.raises(ValueError, match=message) as caught:
        Engine(replace(settings, engine_args=arguments)).start()
    assert "\n" not in str(caught.value)
    assert psutil.Process().children() == before


OWNER = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from gspo_hpc.engine.engine import Engine, EngineDied, EngineSettings, Sampling
from gspo_hpc.engine.outputs import reported_experts
from gspo_hpc.data.records import Prompt
import numpy as np

if __name__ == "__main__":
    engine = Engine(EngineSettings(sys.argv[1], max_model_len=256, kv_cache_gb=0.03, log_path=Path(sys.argv[2])))
    engine.start()
    print("engine", *engine.pids(), flush=True)
    sys.stdin.readline()
    engine.submit(0, Prompt(0, np.arange(5, 50, dtype=np.int32), "", {}), [1, 2], Sampling(max_tokens=100))
    engine.step()
    os.kill(engine.pids()[0], signal.SIGKILL)
    try:
        while True:
            engine.step()
    except EngineDied:
        print("died", flush=True)
"""


@pytest.mark.parametrize("end", ["killed", "by itself"])
def test_nothing_outlives_the_owner(model_path: Path, tmp_path: Path, end: str) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    command = [sys.executable, str(script), str(model_path), str(tmp_path / "log")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        try:
            pids: list[int] = []
            for line in owner.stdout:
                if line.startswith("engine "):
                    pids = [int(pid) for pid in line.split()[1:]]
                    break
            assert pids, (tmp_path / "log").read_text()[-3000:]
            if end == "killed":
                os.kill(owner.pid, signal.SIGKILL)
                assert wait_gone(pids, 5)
            else:  # a dead engine and no close(): the interpreter still ends
                output, _ = owner.communicate("go\n", timeout=120)
                assert "died" in output.splitlines() and owner.returncode == 0
                assert wait_gone(pids, 1)
        finally:
            owner.kill()
