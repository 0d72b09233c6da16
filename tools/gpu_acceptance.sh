#!/usr/bin/env bash
# Measure what only a GPU can show, in independent parts, as a page with pass or fail.
set -euo pipefail
GIVEN="${PYTHON:-}"
. "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

usage() {
    cat <<'TEXT'
usage: bash tools/gpu_acceptance.sh [--out FILE] [--parts PART ...] [--platform auto|cuda|cpu] [other options]

Runs every part of the acceptance in a process of its own with a time limit. The page is written after every row, so
a machine that is taken away leaves what was measured. Exits with 1 if a part failed, and with 2 if nothing could run.
Parts whose packages are missing are skipped, and the page says which packages these are. Nothing is downloaded where
there is a GPU; without one the same code runs in small sizes, in the environment that tools/setup_env.sh makes.

  --out FILE      the page, in Markdown (default: gpu-acceptance.md)
  --parts PART    only these, for example: --parts kernels parity
  --seconds N     for all parts together; those for which no time is left are not run
  --scale X       factor on the time limits of parts (default: 1, on a CPU 3)
  --work DIR      models, runs and logs (default: .cache/acceptance in the project); models are made once
  --list          the parts, in their order
  --help          show this text

environment variables:
  PYTHON          the Python to use, with torch; nothing is set up then
                  (default: that of GSPO_HPC_VENV if it exists, else python3 where it has torch and there is a GPU)
TEXT
}

ARGUMENTS=(--out gpu-acceptance.md) # an --out that is given comes later, and counts
for argument in "$@"; do
    case "$argument" in
        --help | -h) usage; exit 0 ;;
        --out=* | --work=*) ARGUMENTS+=("${argument%%=*}" "${argument#*=}") ;;
        *) ARGUMENTS+=("$argument") ;;
    esac
done

has_torch() { "$1" -c 'import torch' 2>/dev/null; }

if [ -n "$GIVEN" ]; then
    PYTHON="$(command -v "$GIVEN")" || die "gpu_acceptance: PYTHON is $GIVEN, which is no program"
elif [ ! -x "$PYTHON" ]; then
    if nvidia-smi -L >/dev/null 2>&1 && has_torch python3; then
        PYTHON="$(command -v python3)"
    else
        bash "$PROJECT/tools/setup_env.sh" >&2
    fi
fi
has_torch "$PYTHON" || die "gpu_acceptance: $PYTHON has no torch" "Name another Python: PYTHON=... bash tools/gpu_acceptance.sh"

# Files are named from where the user stands; modules are found from the project.
for ((index = 1; index < ${#ARGUMENTS[@]}; index++)); do
    case "${ARGUMENTS[index - 1]}" in --out | --work) ARGUMENTS[index]="$(realpath -m -- "${ARGUMENTS[index]}")" ;; esac
done
cd "$PROJECT"
exec "$PYTHON" -m tools.acceptance "${ARGUMENTS[@]}"
