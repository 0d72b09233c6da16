#!/usr/bin/env bash
# Make the environment of TRL and verl, with which the benchmarks compare this package, on a CPU build of PyTorch.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: bash tools/bench/setup_peers.sh [--python PYTHON]

Makes a virtual environment with TRL and verl in .venv-peers of this checkout, or in $GSPO_HPC_PEERS_VENV.
Does nothing if the environment is up to date, and finishes one that was interrupted.

  --python PYTHON   the interpreter to make it with, 3.11 or later (default: python3)
TEXT
}

say() { printf 'setup_peers: %s\n' "$*"; }
fail() { say "$*" >&2; exit 1; }

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
venv="${GSPO_HPC_PEERS_VENV:-$(cd "$here/../.." && pwd)/.venv-peers}"
python=python3
torch_version=2.13.0+cpu
torch_index=https://download.pytorch.org/whl/cpu

while (($#)); do
    case "$1" in
        -h | --help) usage; exit 0 ;;
        --python) (($# > 1)) || fail "--python needs an interpreter"; python="$2"; shift 2 ;;
        *) fail "unknown argument '$1'; see --help" ;;
    esac
done

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "'$python' is not Python 3.11 or later; name one with --python"

stamp="$venv/.gspo-hpc-peers"
wanted="$(cat "$here/peers.txt" "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1)"
if [[ -f "$stamp" && "$(<"$stamp")" == "$wanted" ]]; then
    say "$venv is up to date already"
    exit 0
fi

# An environment of another's making is never touched: only an empty place, or what this script began.
began="$venv/.gspo-hpc-peers-began"
if [[ -e "$venv" && ! -e "$began" && -n "$(ls -A "$venv")" ]]; then
    fail "$venv exists and was not made by this script: remove it, or set GSPO_HPC_PEERS_VENV to another place"
fi
mkdir -p "$venv"
: >"$began"
rm -f "$stamp"

say "making $venv"
"$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# The CPU build from where pip is configured to look, else from PyTorch's own index of CPU builds; never one for CUDA.
say "installing torch $torch_version"
if ! pip install --quiet "torch==$torch_version" 2>"$venv/torch.log"; then
    say "pip's own sources have no torch $torch_version; trying $torch_index"
    pip install --quiet --index-url "$torch_index" "torch==$torch_version" 2>>"$venv/torch.log" ||
        fail "no CPU build of torch could be installed: $(tail -n 1 "$venv/torch.log")"
fi

say "installing TRL, verl and what they need"
pip install --quiet --no-deps --requirement "$here/peers.txt"

say "checking that what the benchmarks measure can be imported"
OMP_NUM_THREADS=1 "$venv/bin/python" - <<'PYTHON'
import torch

assert torch.version.cuda is None, "this torch is built for CUDA"
import trl, verl
from trl import GRPOTrainer
from trl.kernels import ChunkedLogProbFunction
from trl.trainer.utils import selective_log_softmax
from verl.trainer.ppo.core_algos import compute_policy_loss_gspo
from verl.utils.experimental.torch_functional import FusedLinearForPPO
from verl.utils.seqlen_balancing import rearrange_micro_batches

print(f"setup_peers: torch {torch.__version__}, TRL {trl.__version__}, verl {verl.__version__}")
PYTHON

printf '%s' "$wanted" >"$stamp"
say "done: $venv"
