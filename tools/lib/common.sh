# Shared by the scripts in tools/: where things are, how to speak, how to stop.
# Sourced, not run. Sets PROJECT, VENV, PYTHON (of the environment) and CACHE.

PROJECT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
VENV="${GSPO_HPC_VENV:-$PROJECT/.venv}"
CACHE="${GSPO_HPC_CACHE:-$PROJECT/.cache}"
PYTHON="$VENV/bin/python"

say() { printf '\n== %s\n' "$*"; }

# Print at most two lines: what is wrong, and the fix.
die() {
    printf '%s\n' "$@" >&2
    exit 1
}
