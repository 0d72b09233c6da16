#!/usr/bin/env bash
# Run the tests of layouts, model families and checkpoints with the newest supported versions.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

usage() {
    cat <<'TEXT'
usage: bash tools/second_lane.sh [pytest arguments]

Makes a second environment with Python 3.12 and megatron-core 0.19, and runs the tests of parallel layouts, model
families, weights and checkpoints in it (tests/unit, tests/torch, tests/gloo). It does not touch the first environment.

  --help   show this text

Other arguments go to pytest instead of those three folders, for example: bash tools/second_lane.sh tests/gloo -x

environment variables:
  GSPO_HPC_SECOND_VENV  where the second environment goes (default: .venv-second in the project)
  GSPO_HPC_PYTHON       the Python to make it with (default: python3.12)
  GSPO_HPC_TORCH        as for tools/setup_env.sh
TEXT
}

case "${1-}" in --help | -h) usage; exit 0 ;; esac
MEGATRON="0.19.2"

cd "$PROJECT"
export GSPO_HPC_VENV="${GSPO_HPC_SECOND_VENV:-$PROJECT/.venv-second}"
export GSPO_HPC_PYTHON="${GSPO_HPC_PYTHON:-python3.12}"
VENV="$GSPO_HPC_VENV" PYTHON="$GSPO_HPC_VENV/bin/python"
"$GSPO_HPC_PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null ||
    die "second_lane: $GSPO_HPC_PYTHON is not Python 3.12; name one in GSPO_HPC_PYTHON."
bash tools/setup_env.sh --dev
if [ "$("$PYTHON" -c 'from importlib.metadata import version; print(version("megatron-core"))')" != "$MEGATRON" ]; then
    say "installing megatron-core $MEGATRON in place of the pinned version"
    "$PYTHON" -m pip install -q --disable-pip-version-check --no-input --no-deps "megatron-core==$MEGATRON" </dev/null
fi

say "tests with $("$PYTHON" --version) and megatron-core $MEGATRON"
# doctor says that this environment is not the one that setup.cfg wants, and is right.
[ $# -gt 0 ] || set -- --ignore=tests/unit/doctor tests/unit tests/torch tests/gloo
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$PYTHON" -m pytest "$@" </dev/null
