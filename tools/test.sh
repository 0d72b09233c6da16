#!/usr/bin/env bash
# Set up what the tests need, then check style, types and floors, then run the tests: quick tiers first.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

usage() {
    cat <<'TEXT'
usage: bash tools/test.sh [--quick] [pytest arguments]

Sets up the environment with what the tests need, checks formatting, style, types and the floors between modules, and
runs the tests in tiers: unit (plain Python), torch, gloo (Megatron-Core ranks), engine (vLLM), run (whole runs), slurm (a real
Slurm of four nodes on this machine, installed with apt-get where it is missing).

  --quick   only the tiers unit and torch
  --help    this text

Other arguments go to pytest, for example: bash tools/test.sh -k packing, or bash tools/test.sh tests/gloo -x
TEXT
}

QUICK=0 ARGUMENTS=() NAMED=0
for argument in "$@"; do
    case "$argument" in
        --quick) QUICK=1 ;;
        --help | -h) usage; exit 0 ;;
        *)
            ARGUMENTS+=("$argument")
            case "$argument" in tests/* | *.py | *.py::*) NAMED=1 ;; esac # run these instead of the tiers
            ;;
    esac
done

cd "$PROJECT"
bash tools/setup_env.sh --dev

TIERS=(unit torch gloo engine run slurm)
[ "$QUICK" = 0 ] || TIERS=(unit torch)
FOLDERS=()
if [ "$NAMED" = 0 ]; then
    for tier in "${TIERS[@]}"; do
        # pytest runs them in this order, so that what fails quickly fails first.
        [ ! -d "tests/$tier" ] || FOLDERS+=("tests/$tier")
    done
fi

say "format, style"
"$VENV/bin/ruff" format --check .
"$VENV/bin/ruff" check .
say "types"
"$PYTHON" -m mypy
say "floors"
"$VENV/bin/lint-imports"
say "tests"
# Small tests on a few cores: more threads than one a process only get in each other's way.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$PYTHON" -m pytest "${FOLDERS[@]}" "${ARGUMENTS[@]}" </dev/null
