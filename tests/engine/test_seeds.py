"""What a seed for each completion costs in vLLM's runner V2, whose own kernel runs in Triton's interpreter. 10 s.

Catches a vLLM whose sampler starts a kernel for each seed, or gives a completion other tokens in another batch, and
settings of ours for which vLLM leaves runner V2.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from gspo_hpc.engine.settings import EngineSettings, arguments

SAMPLING = """
import json, torch, triton
import triton.language as tl
import vllm.triton_utils as utils
utils.triton, utils.tl = triton, tl  # without a GPU vLLM puts nothing in their place
from vllm.v1.worker.gpu.sample import gumbel

class Counted:
    launches = 0
    kernel = gumbel._gumbel_sample_kernel
    def __getitem__(self, grid):
        Counted.launches += 1
        return self.kernel[grid]

gumbel._gumbel_sample_kernel = Counted()

def draw(seeds, logits):
    rows, ones = torch.arange(len(seeds), dtype=torch.int32), torch.ones(len(seeds))
    positions = torch.full((len(seeds),), 7)
    return gumbel.gumbel_sample(logits, rows, ones, torch.tensor(seeds), positions, False, False).tolist()

logits, seeds = torch.randn(1, 3000, generator=torch.Generator().manual_seed(1)), [5, 2**60, 7, *range(100, 113)]
together = draw(seeds, logits.repeat(len(seeds), 1))
launches = Counted.launches
print(json.dumps([launches, together, [draw([seed], logits)[0] for seed in seeds]]))
"""

CHOICE = """
import json, sys
from vllm.config import vllm
from vllm.engine.arg_utils import EngineArgs
values = json.loads(sys.argv[1])
fields = {name: value for name, value in values.items() if name in EngineArgs.__dataclass_fields__}
config = EngineArgs(**fields, skip_tokenizer_init=True).create_engine_config()
vllm.HAS_TRITON = True  # as on a GPU
print(json.dumps([config.use_v2_model_runner, config._get_v2_model_runner_unsupported_features()]))
"""


def answer(script: str, *words: str) -> Any:
    """Return what a script prints in its last line, as JSON."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    command = [sys.executable, "-c", script, *words]
    found = subprocess.run(command, env=own | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads(found.stdout.splitlines()[-1])


def test_seeds_of_a_batch_take_one_kernel_and_a_completion_its_own_tokens() -> None:
    launches, together, alone = answer(SAMPLING)
    assert launches == 1 and together == alone and len(set(together)) > 10


def test_vllm_takes_its_runner_v2_for_what_we_ask(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaConfig(vocab_size=100, architectures=["LlamaForCausalLM"], **sizes).save_pretrained(tmp_path)
    asked = arguments(EngineSettings(str(tmp_path), platform="cuda", max_model_len=64), "gspo_hpc")
    for name in ("weight_transfer_config", "enable_sleep_mode"):  # vLLM refuses them here, on a CPU
        del asked[name]
    assert answer(CHOICE, json.dumps(asked)) == [True, []]
