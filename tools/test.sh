#!/usr/bin/env bash
# Set up what the tests need, then check style, types and layers, then run the tests: quick tiers first.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

usage() {
    cat <<'TEXT'
usage: bash tools/test.sh [--quick] [pytest arguments]

Sets up the environment for the tests, checks formatting, style, types and the layers between sub-packages, and runs
the tests on four workers. One runs the tier slurm, which mostly waits for Slurm's clocks: it starts a real Slurm of
four nodes on this machine, and installs it with apt-get if it is missing. The others run, quick ones first, the tiers
unit (plain Python), torch, browser (pages in Chromium), gloo (Megatron-Core ranks), run (whole runs) and engine (vLLM).

  --quick   run only the tiers unit and torch
  --help    show this text

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

TIERS=(slurm unit torch browser gloo run engine) # a worker takes the first, the others begin with the second
[ "$QUICK" = 0 ] || TIERS=(unit torch)
FOLDERS=()
if [ "$NAMED" = 0 ]; then
    for tier in "${TIERS[@]}"; do
        [ ! -d "tests/$tier" ] || FOLDERS+=("tests/$tier")
    done
fi

say "format, style"
"$VENV/bin/ruff" format --check .
"$VENV/bin/ruff" check .
say "types"
env -u PYTHONPATH "$PYTHON" -m mypy # mypy is silent about files that it imports from there, tests among them
say "layers"
"$VENV/bin/lint-imports"
say "tests"
unset PYTHONDONTWRITEBYTECODE # where it is set, each of some hundred processes would compile the package again
# Small tests on a few cores: more threads than one a process only get in each other's way.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# Four workers for the tiers (tests/conftest.py says who gets what); none for tests that are named.
[ "$NAMED" = 1 ] || ARGUMENTS=(-n 4 --dist loadscope --no-loadscope-reorder "${ARGUMENTS[@]}")
exec "$PYTHON" -m pytest "${FOLDERS[@]}" "${ARGUMENTS[@]}" </dev/null
