"""Generation servers behind launchers, which the script starts beside the run (under 2 s)."""

from __future__ import annotations

import pytest

from gspo_hpc.importers.convert import convert

TRL = "accelerate launch --num_processes 4 train_grpo.py --model_name_or_path m --num_generations 8 --use_vllm "
TRL += "--per_device_train_batch_size 8 --vllm_mode server"
SWIFT = "NPROC_PER_NODE=4 swift rlhf --rlhf_type grpo --model m --num_generations 8 --use_vllm true "
SWIFT += "--per_device_train_batch_size 8 --vllm_mode server"
LAUNCHERS = [
    "",
    "/opt/venv/bin/",
    "srun --nodes=1 --nodelist=n3 ",
    "uv run --with trl ",
    "poetry run ",
    "conda run -n env ",
    "timeout 3600 numactl -N 0 ",
    "stdbuf -oL nice -n 5 ",
    "setsid nohup ",
    "env CUDA_VISIBLE_DEVICES=4,5 ",
    "ssh n3 ",
    "apptainer exec --nv image.sif ",
    "docker run --gpus all --shm-size 16g image ",
]


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    ("serve", "sign", "run"),
    [
        ("trl vllm-serve", "--", TRL),
        ("swift rollout", "--vllm_", SWIFT),
    ],
)
def test_a_server_is_seen_behind_a_launcher(launcher: str, serve: str, sign: str, run: str) -> None:
    size = f"{sign}tensor_parallel_size 2 {sign}gpu_memory_utilization 0.7"
    found = convert(f"{launcher}{serve} --model m {size} &\n{run}\n")
    assert found.config.rollout.tensor_parallel_size == 2 and found.config.cluster.gpus_per_node == 6
    assert found.config.rollout.engine == {"gpu_memory_utilization": 0.7}
    assert not any("is not in the script" in line for line in found.assumed)


@pytest.mark.parametrize("launcher", ["", "srun ", "uv run ", "CUDA_VISIBLE_DEVICES=4,5 "])
@pytest.mark.parametrize(
    ("serve", "sign", "run"),
    [
        ("python -m trl.scripts.vllm_serve", "--", TRL),
        ("python3 trl/scripts/vllm_serve.py", "--", TRL),
        ("python -m swift.cli.rollout", "--vllm_", SWIFT),
        ("python swift/cli/rollout.py", "--vllm_", SWIFT),
    ],
)
def test_a_server_that_python_starts_is_seen(launcher: str, serve: str, sign: str, run: str) -> None:
    found = convert(f"{launcher}{serve} --model m {sign}tensor_parallel_size 2 &\n{run}\n")
    assert found.config.rollout.tensor_parallel_size == 2


def test_a_server_within_one_word_of_ssh_is_seen() -> None:
    found = convert(f"ssh n3 'trl vllm-serve --model m --tensor_parallel_size 2' &\n{TRL}\n")
    assert found.config.rollout.tensor_parallel_size == 2


@pytest.mark.parametrize("line", ["echo trl vllm-serve --tensor_parallel_size 2", "grep trl vllm-serve log"])
def test_a_text_that_names_the_server_starts_none(line: str) -> None:
    found = convert(f"{line}\n{TRL}\n")
    assert found.config.rollout.tensor_parallel_size == 1
    assert any("trl vllm-serve is not in the script" in line for line in found.assumed)


def test_options_of_the_launcher_are_not_the_servers() -> None:
    found = convert(f"srun --data_parallel_size 4 trl vllm-serve --model m --tensor_parallel_size 2 &\n{TRL}\n")
    assert (found.config.rollout.tensor_parallel_size, found.config.rollout.engines_per_node) == (2, 1)


def test_engines_that_nodes_do_not_divide_are_rounded_down() -> None:
    """Three engines over two nodes: one on each, which is told; two on each would be GPUs that nobody has."""
    serve = "trl vllm-serve --model m --tensor_parallel_size 2 --data_parallel_size 3 &"
    run = TRL.replace("--num_processes 4", "--num_machines 2 --num_processes 8")
    found = convert(f"{serve}\n{run}\n")
    assert (found.config.cluster.nodes, found.config.rollout.engines_per_node) == (2, 1)
    assert any("3 in the original, and 2 here" in line for line in found.differs)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--vllm_max_model_len 1024", "--vllm_max_model_len 1024 of swift rollout: an engine of ms-swift stops there"),
        ("--vllm_max_model_len 5120", ""),
        ("--vllm_max_model_len $LEN", "vllm_max_model_len=$LEN"),
        ('--system "Be short."', "--system Be short. of swift rollout: engines complete prompts that its template"),
        ("--use_chat_template false", "--use_chat_template false of swift rollout"),
        ("--enable_thinking false", "--enable_thinking false of swift rollout"),
        ("--max_length 100", "--max_length 100 of swift rollout: it bounds the prompts of engines there; here that is"),
        ("--vllm_quantization fp8", "--vllm_quantization fp8 of swift rollout: it decides how engines compute"),
        ("--temperature 0.5", "--temperature 0.5 of swift rollout: requests of the trainer have values of their own"),
        ("--port 8000", ""),
    ],
)
def test_options_of_a_server_that_decide_lengths_or_sampling_are_told(options: str, told: str) -> None:
    run = f"{SWIFT} --max_length 1024 --max_completion_length 4096"
    found = convert(f"swift rollout --model m {options} &\n{run}\n")
    lines = [*found.assumed, *found.differs]
    assert any(told in line for line in lines)
    assert told or not any("of swift rollout" in line for line in lines)


def test_a_shorter_window_of_trls_server_is_told() -> None:
    run = f"{TRL} --max_prompt_length 512 --max_completion_length 2048"
    found = convert(f"trl vllm-serve --model m --max_model_len 2048 &\n{run}\n")
    assert any("--max_model_len 2048 of trl vllm-serve: an engine of TRL stops there" in line for line in found.assumed)


@pytest.mark.parametrize("word", ["true", "True", "t", "T", "yes", "y", "Y", "1", "", "false", "f", "no", "n", "0"])
def test_a_server_of_trl_takes_all_words_for_true_that_its_parser_takes(word: str) -> None:
    """transformers' parser of arguments reads t and y, too; a bare option is true."""
    found = convert(f"trl vllm-serve --model m --enforce_eager {word} &\n{TRL}\n")
    assert found.config.rollout.engine["enforce_eager"] is (word.lower() in ("", "true", "t", "yes", "y", "1"))


def test_arguments_of_vllm_that_a_server_has_are_those_of_the_engines() -> None:
    options = "--vllm_enforce_eager --vllm_max_num_seqs 64 --vllm_enable_prefix_caching false"
    found = convert(f"swift rollout --model m {options} &\n{SWIFT}\n")
    assert found.config.rollout.engine == {
        "gpu_memory_utilization": 0.9,
        "enforce_eager": True,
        "max_num_seqs": 64,
        "enable_prefix_caching": False,
    }
