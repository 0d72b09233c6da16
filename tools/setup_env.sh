#!/usr/bin/env bash
# Make the Python environment of this project, for machines without a GPU.
set -euo pipefail
export PYTHONSAFEPATH=1 # a file beside whoever calls this must not be imported
. "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

usage() {
    cat <<'TEXT'
usage: bash tools/setup_env.sh [--dev] [--force]

Makes a virtual environment with everything this project needs on a machine without a GPU:
a CPU build of torch, vLLM for the CPU, Megatron-Core. Changes nothing if it is up to date already.

  --dev     install what the tests need, too
  --force   remove the environment and make it again
  --help    show this text

environment variables:
  GSPO_HPC_VENV    where the environment goes (default: .venv in the project)
  GSPO_HPC_PYTHON  the Python to make it with (default: the first usable one of python3.11, python3.12, python3)
  GSPO_HPC_TORCH   another build of torch (default: torch==2.13.0+cpu), for example torch==2.13.0, the much larger build
                   for CUDA, if there is no CPU build for this Python
  GSPO_HPC_CHROMIUM  the browser of the tests (default: Chromium or Chrome on PATH; --dev installs Debian's if there is none)
TEXT
}

DEV=0 FORCE=0
while [ $# -gt 0 ]; do
    case "$1" in
        --dev) DEV=1 ;;
        --force) FORCE=1 ;;
        --help | -h) usage; exit 0 ;;
        *) die "setup_env: no option $1; see bash tools/setup_env.sh --help" ;;
    esac
    shift
done

REQUIREMENTS="$PROJECT/tools/requirements"
TORCH="${GSPO_HPC_TORCH:-torch==2.13.0+cpu}"
STAMP="$VENV/.gspo_hpc_stamp"

# What the environment was made from: it is made anew, or added to, when this changes.
fingerprint() {
    cat "$REQUIREMENTS"/*.txt "$PROJECT/setup.cfg" "$PROJECT/pyproject.toml" "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1
    printf '%s %s\n' "$PROJECT" "$TORCH"
}
# A browser for tests/browser, or a machine without a package of one: Ubuntu has only a snap.
browser() {
    local name
    for name in "${GSPO_HPC_CHROMIUM:-chromium}" chromium-browser google-chrome chrome; do
        ! command -v "$name" >/dev/null || return 0
    done
    (. /etc/os-release && [ "${ID:-}" = ubuntu ]) 2>/dev/null
}
up_to_date() {
    [ -x "$PYTHON" ] && [ -f "$STAMP" ] && [ "$(head -n 2 "$STAMP")" = "$(fingerprint)" ] &&
        { [ "$DEV" = 0 ] || { grep -qx dev "$STAMP" && browser && command -v bwrap >/dev/null; }; }
}

[ "$FORCE" = 1 ] || ! up_to_date || exit 0

if [ -e "$VENV" ] && [ ! -f "$VENV/pyvenv.cfg" ]; then
    die "setup_env: $VENV exists and is not a virtual environment; remove it or set GSPO_HPC_VENV."
fi

# One set-up at a time; a second one waits and then finds it done. The lock is on the folder around the environment.
mkdir -p "$(dirname "$VENV")"
exec 9<"$(dirname "$VENV")"
flock -n 9 || { say "another set-up is working on $VENV; waiting for it"; flock 9; }
[ "$FORCE" = 1 ] || ! up_to_date || exit 0

# --- From the system: only what is missing ---

# The first Python that serves. The pins were resolved for 3.11 and checked to have wheels for 3.12 to 3.14.
find_python() {
    local candidate
    for candidate in ${GSPO_HPC_PYTHON:-python3.11 python3.12 python3 python3.13 python3.14}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
}

# Debian package names of what this machine lacks.
missing_packages() {
    local python suffix=""
    python="$(find_python)"
    if [ -z "$python" ]; then
        echo python3 python3-venv python3-dev
    else
        case "$python" in /usr/bin/*) suffix="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" ;; esac
        "$python" -c 'import ensurepip, venv' 2>/dev/null || echo "python${suffix:-3}-venv"
        # torch compiles small kernels inside vLLM's sampler: a C++ compiler and Python's headers.
        [ -f "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ||
            echo "python${suffix:-3}-dev"
    fi
    command -v g++ >/dev/null || echo g++
    # vLLM's compiled part is linked against libnuma.
    PATH="$PATH:/sbin:/usr/sbin" ldconfig -p | grep -q 'libnuma\.so\.1' || echo libnuma1
    if [ "$DEV" = 1 ]; then # shells in which the tests press Tab
        command -v zsh >/dev/null || echo zsh
        command -v fish >/dev/null || echo fish
        browser || echo chromium
        command -v bwrap >/dev/null || echo bubblewrap # a rung of the sandbox
    fi
}

install_packages() { # package...
    local root=()
    [ "$(id -u)" = 0 ] || root=(sudo -n)
    if ! command -v apt-get >/dev/null || ! "${root[@]}" true 2>/dev/null; then
        die "setup_env: this machine lacks $*, and this script may not install packages here (no root, sudo or apt-get)." \
            "Let an administrator run: apt-get install $*"
    fi
    say "installing system packages: $*"
    "${root[@]}" apt-get update -q >&2 </dev/null || say "apt-get update failed; trying with the existing package lists"
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "$@" </dev/null
}

# --- From Python's package indexes ---

# pip with its log in a file: a line of progress now and then, and on failure the end of the log.
pip_install() { # what it is, pip arguments...
    local what="$1" log="$VENV/setup.log"
    shift
    say "$what"
    if ! "$PYTHON" -m pip install --disable-pip-version-check --no-input --progress-bar off "$@" 2>&1 </dev/null |
        tee -a "$log" | awk '/^(Collecting|Processing)/ { if (++n % 20 == 0) { print "   " n " packages found"; fflush() } }
                             /^Installing collected/ { print "   unpacking"; fflush() }'; then
        tail -n 15 "$log" >&2
        die "setup_env: pip failed ($what); the whole log is $log"
    fi
}

install_torch() {
    local log="$VENV/setup.log"
    if [ "${TORCH%+cpu}" = "$TORCH" ]; then
        pip_install "$TORCH with what it needs" "$TORCH"
        return
    fi
    say "torch, CPU build"
    # A CPU build carries +cpu in its version: from where pip is configured to look, else from PyTorch's own index.
    if ! "$PYTHON" -m pip install --disable-pip-version-check --no-input --no-deps "$TORCH" >>"$log" 2>&1 </dev/null; then
        pip_install "torch is not where pip looks; taking it from download.pytorch.org" \
            --no-deps --index-url https://download.pytorch.org/whl/cpu "$TORCH"
    fi
}

# Everything imports, torch is the CPU build, and the packages that break transformers are not there.
self_test() {
    OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 "$PYTHON" - "$TORCH" <<'PYTHON' 2>>"$VENV/setup.log"
import importlib.util
import sys

import torch

if torch.version.cuda is not None and sys.argv[1].endswith("+cpu"):
    sys.exit(f"setup_env: torch {torch.__version__} is a CUDA build; run again with --force")
for name in ("torchvision", "torchaudio", "torchcodec"):
    if importlib.util.find_spec(name):
        sys.exit(f"setup_env: {name} is installed; it does not fit this torch. Run again with --force")
from megatron.core.models.gpt.gpt_model import GPTModel
from transformers import AutoTokenizer, LlamaForCausalLM, Qwen3ForCausalLM
from vllm import LLM
import vllm

import gspo_hpc

print(f"   torch {torch.__version__}, vLLM {vllm.__version__}, gspo_hpc {gspo_hpc.__version__}: all import")
PYTHON
}

mapfile -t MISSING < <(missing_packages | tr ' ' '\n')
[ ${#MISSING[@]} = 0 ] || install_packages "${MISSING[@]}"
BASE="$(find_python)"
[ -n "$BASE" ] || die "setup_env: no Python 3.11 to 3.14 found." \
    "Install one (Debian 12: apt-get install python3 python3-venv), or name it in GSPO_HPC_PYTHON."

START=$SECONDS
if [ "$FORCE" = 1 ] || ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
    say "virtual environment in $VENV, with $BASE"
    "$BASE" -m venv --clear "$VENV"
fi
rm -f "$STAMP"
: >"$VENV/setup.log"
"$PYTHON" -m pip uninstall -q -y torchvision torchaudio torchcodec >>"$VENV/setup.log" 2>&1
[ "$("$PYTHON" -c 'import torch; print(torch.__version__)' 2>/dev/null)" = "${TORCH#torch==}" ] || install_torch
files=(-r "$REQUIREMENTS/cpu.txt")
[ "$DEV" = 0 ] || files+=(-r "$REQUIREMENTS/dev.txt" -r "$REQUIREMENTS/trackers.txt")
pip_install "vLLM, Megatron-Core and the rest" --no-deps "${files[@]}"
pip_install "this project" --no-deps --no-build-isolation -e "$PROJECT"
say "checking that everything imports"
self_test || { tail -n 15 "$VENV/setup.log" >&2; die "setup_env: the environment does not work; the log is $VENV/setup.log"; }
{
    fingerprint
    [ "$DEV" = 0 ] || echo dev
} >"$STAMP"
say "environment ready in $VENV ($((SECONDS - START)) s)"
