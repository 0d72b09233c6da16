"""vLLM's own kernels for the CPU give what its torch code gives, and leave alone what they do not take."""

from __future__ import annotations

import json
import os
import subprocess
import sys

# In a process of its own, because the layers are changed for good. Prints, per layer and kind of input, the largest
# difference to the torch code.
_PROGRAM = """
import json, torch
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
current_platform.import_kernels()
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from gspo_hpc.engine import compat

compat.use_cpu_kernels()
compat.use_cpu_kernels()  # vLLM may load a plugin several times
torch.manual_seed(0)
result = {}
eager = VllmConfig(compilation_config=CompilationConfig(mode=0, custom_ops=["all"]))
with set_current_vllm_config(eager), torch.no_grad():
    class Halved(SiluAndMul):
        @staticmethod
        def forward_native(x):
            return SiluAndMul.forward_native(x) / 2
    for name, width, view in (("even", 64, False), ("odd", 40, False), ("view", 64, True)):
        norm = RMSNorm(width, eps=1e-5)
        norm.weight.data = torch.randn(width)
        make = lambda w: torch.randn(7, 2 * w)[:, :w] if view else torch.randn(7, w)
        x, residual = make(width), make(width)
        result[f"norm {name}"] = norm(x), norm.forward_native(x)
        a, b = norm(x.clone(), residual.clone()), norm.forward_native(x.clone(), residual.clone())
        result[f"add norm {name}"], result[f"residual {name}"] = (a[0], b[0]), (a[1], b[1])
        x = make(2 * width)
        result[f"silu {name}"] = SiluAndMul()(x), SiluAndMul.forward_native(x)
        result[f"subclass {name}"] = Halved()(x), Halved.forward_native(x)
print(json.dumps({key: float((a - b).abs().max()) for key, (a, b) in result.items()}))
"""


def test_kernels_equal_the_torch_code() -> None:
    env = os.environ | {"TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-c", _PROGRAM]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    differences = json.loads(run.stdout.splitlines()[-1])
    assert len(differences) == 15
    for name, difference in differences.items():
        assert difference < 2e-6, name
    # Another order of operations shows in the last bits: where there is no difference at all, torch computed it.
    assert differences["norm even"] > 0 or differences["silu even"] > 0
    assert differences["norm view"] == differences["silu odd"] == differences["subclass even"] == 0
