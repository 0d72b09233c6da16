#!/usr/bin/env bash
# Run the checks of the GPU path that need other packages than the test environment has, but no GPU.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

VLLM=(0.22.0 0.26.0 0.29.0 0.33.0) # the oldest and the newest that are supported, and two between
TORCH=(2.11.0 2.13.0 2.14.0)       # what these versions of vLLM pin
ENGINE=(2.17.0 2.20.2)             # Transformer Engine: the oldest that is supported, and the newest
MEGATRON=0.19.2                    # the newest that is supported; the test environment has the oldest
UV=0.13.9                          # resolves the sets of packages for GPUs
VERIFIERS=(0.1.14)                 # of the range that docs/environments.md names
OF_VERIFIERS=(sophistry-bench-sprint==0.1.6 staros-stardata==0.1.1) # environments that need no network

usage() {
    cat <<TEXT
usage: bash tools/lanes.sh vllm|torch|transformer-engine|verifiers|resolve|evaluators [VERSION...] [-- pytest arguments]

  vllm                the Python files of vLLM (default: ${VLLM[*]}), around a GPU's memory that only counts
  torch               builds of torch for CUDA (default: ${TORCH[*]}): forward and backward under fake tensors
  transformer-engine  the calls of Transformer Engine against its sources (default: ${ENGINE[*]})
  verifiers           environments of verifiers (default: ${VERIFIERS[*]}) in a Python of their own: turns, rows, and a run of
                      SmolLM2 (python tools/prepare_smollm2.py --out .cache/smollm2-135m-instruct comes first)
  resolve             the pinned sets for GPUs in tools/requirements/gpu, by the metadata of every package; UPDATE=1
                      resolves them anew around their versions of vLLM, torch, megatron-core and Transformer Engine
  evaluators          lm-eval and Inspect, in an environment of their own, against gspo-hpc serve (docs/evaluation.md)

Each lane fetches what it needs into .cache/lanes, once, and runs its tests once for each version. The lane torch
needs 4 to 5 GiB for each of its versions, evaluators one GiB, the others some ten megabytes. For example:
bash tools/lanes.sh vllm 0.33.0 -- -x

environment variables:
  GSPO_HPC_VENV   the environment that tools/setup_env.sh has made (default: .venv in the project)
  GSPO_HPC_CACHE  the folder of what is fetched (default: .cache in the project)
TEXT
}

LANE="" VERSIONS=()
while [ $# -gt 0 ]; do
    case "$1" in
        --help | -h) usage; exit 0 ;;
        --) shift; break ;;
        vllm | torch | transformer-engine | verifiers | resolve | evaluators) LANE="$1" ;;
        [0-9]*) VERSIONS+=("$1") ;;
        *) die "lanes: no option $1; see bash tools/lanes.sh --help" ;;
    esac
    shift
done
[ -n "$LANE" ] || { usage >&2; exit 1; }
[ -x "$PYTHON" ] || die "lanes: $PYTHON is not there; make it with bash tools/setup_env.sh --dev"

cd "$PROJECT"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
BEFORE="${PYTHONPATH:-}" FAILED=()

parts() { "$PYTHON" tools/lib/wheel_parts.py "$@"; } # requirement, folder, patterns

run() { # folder that comes before all others, name of the version, pytest arguments
    local folder="$1" name="$2"
    shift 2
    say "$name"
    PYTHONPATH="$folder${BEFORE:+${folder:+:}$BEFORE}" "$PYTHON" -m pytest "$@" </dev/null || FAILED+=("$name")
}

case "$LANE" in
    vllm)
        for version in "${VERSIONS[@]:-${VLLM[@]}}"; do
            folder="$CACHE/lanes/vllm/$version"
            parts "vllm==$version" "$folder" 'vllm/*.py'
            GSPO_HPC_LANE_VLLM="$version" run "$folder" "vLLM $version" tests/engine/test_card.py "$@"
        done
        ;;
    torch)
        device="$CACHE/lanes/one_device/libcuda.so.1"
        mkdir -p "$(dirname "$device")"
        g++ -x c -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$device" tools/lib/one_device.c
        for version in "${VERSIONS[@]:-${TORCH[@]}}"; do
            folder="$CACHE/lanes/torch/$version"
            if [ ! -d "$folder" ]; then
                say "fetching torch $version for CUDA"
                # Three signs of equality: a build for the CPU with the same number is another version.
                "$PYTHON" -m pip install -q --no-input --progress-bar off --no-compile --target "$folder.part" \
                    "torch===$version" </dev/null
                mv "$folder.part" "$folder"
            fi
            export GSPO_HPC_LANE_TORCH="$version"
            # Nothing is compiled for the device that is not there.
            TORCHDYNAMO_DISABLE=1 LD_PRELOAD="$device" run "$folder" "torch $version for CUDA" tests/torch/ops/test_fake_cuda.py \
                tests/lanes/test_fake_update.py "$@"
        done
        ;;
    transformer-engine)
        export GSPO_HPC_LANE_MEGATRON="$CACHE/lanes/megatron-core/$MEGATRON/megatron"
        parts "megatron-core==$MEGATRON" "$CACHE/lanes/megatron-core/$MEGATRON" 'megatron/*.py'
        for version in "${VERSIONS[@]:-${ENGINE[@]}}"; do
            folder="$CACHE/lanes/transformer-engine/$version"
            parts "transformer-engine==$version" "$folder" 'transformer_engine/*.py'
            export GSPO_HPC_LANE_TE="$folder/transformer_engine"
            run "" "Transformer Engine $version" tests/lanes/test_transformer_engine.py \
                tests/lanes/test_transformer_engine_double.py "$@"
        done
        ;;
    verifiers)
        for version in "${VERSIONS[@]:-${VERIFIERS[@]}}"; do
            folder="$CACHE/lanes/verifiers/$version"
            if [ ! -d "$folder" ]; then
                say "installing verifiers $version, and ${OF_VERIFIERS[*]}"
                rm -rf "$folder.part"
                "$PYTHON" -m venv "$folder.part"
                "$folder.part/bin/python" -m pip install -q --no-input --progress-bar off "verifiers==$version" \
                    "${OF_VERIFIERS[@]}" </dev/null
                mv "$folder.part" "$folder" # its python is a link, and finds its packages where it is
            fi
            GSPO_HPC_VERIFIERS="$folder/bin/python" run "" "verifiers $version" -s tests/unit/rewards/test_verifiers.py \
                tests/lanes/test_verifiers_run.py "$@"
        done
        ;;
    resolve)
        folder="$CACHE/lanes/uv/$UV"
        [ -d "$folder" ] || {
            "$PYTHON" -m pip install -q --no-input --progress-bar off --target "$folder.part" "uv==$UV" </dev/null
            mv "$folder.part" "$folder"
        }
        export GSPO_HPC_LANE_UV="$folder/bin/uv" UV_CACHE_DIR="$CACHE/lanes/uv/cache"
        chosen="$(printf ' or vllm-%s' "${VERSIONS[@]}")"
        [ ${#VERSIONS[@]} = 0 ] || set -- -k "${chosen# or }" "$@"
        run "" "sets of packages for GPUs" tests/lanes/test_resolved_sets.py "$@"
        ;;
    evaluators)
        folder="$CACHE/lanes/evaluators"
        if [ ! -d "$folder" ]; then
            say "fetching lm-eval and Inspect"
            rm -rf "$folder.part"
            "$PYTHON" -m venv "$folder.part"
            "$PYTHON" -c 'import configparser; config = configparser.ConfigParser(); config.read("setup.cfg")
extras = config["options.extras_require"]; print(extras["lm-eval"].strip(), extras["inspect"].strip(), sep="\n")' \
                > "$folder.part/wanted.txt"
            "$folder.part/bin/python" -m pip install -q --no-input --progress-bar off -r "$folder.part/wanted.txt" </dev/null
            mv "$folder.part" "$folder"
        fi
        GSPO_HPC_LANE_EVALUATORS="$folder" run "" "lm-eval and Inspect" tests/lanes/test_evaluators.py "$@"
        ;;
esac
[ ${#FAILED[@]} = 0 ] || die "lanes: failed with ${FAILED[*]}"
