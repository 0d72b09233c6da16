#!/usr/bin/env bash
# From a fresh machine to a trained model: environment, model, data, training, report.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

usage() {
    cat <<'TEXT'
usage: bash tools/quickstart.sh [--config NAME] [--steps N] [--run-dir DIR] [key=value ...]

Sets up the environment, prepares model and data, trains with GSPO, writes a report and says what the model learned.
Steps that are done already are not repeated, and a run that was stopped resumes where it stopped.

  --config   smollm2  SmolLM2-135M-Instruct learns to add numbers up to 20 (default)
             tiny     a model of 0.4 million parameters learns to carry; much shorter
             guess    the same model learns a guessing game, a conversation
             calculator  it begins to learn to say what a calculator tells it
             docs/results.md says how long the training took
  --steps    optimizer steps (default: as in the config); with more steps a finished run continues
  --run-dir  the run directory (default: runs/smollm2_cpu or runs/tiny_cpu in the project)
  key=value  any other setting of the run, as in `gspo-hpc train`
  --help     show this text

environment variables:
  GSPO_HPC_CACHE  where model and data are kept (default: .cache in the project)
  GSPO_HPC_VENV   where the Python environment is (default: .venv in the project)
TEXT
}

CONFIG=smollm2 SETTINGS=() RUN=""
while [ $# -gt 0 ]; do
    case "$1" in
        --config | --steps | --run-dir)
            [ -n "${2-}" ] || die "quickstart: $1 needs a value; see bash tools/quickstart.sh --help"
            case "$1" in
                --config) CONFIG="$2" ;;
                --steps) SETTINGS+=("run.max_steps=$2") ;;
                --run-dir) RUN="$(realpath -m -- "$2")" ;;
            esac
            shift
            ;;
        --help | -h) usage; exit 0 ;;
        -*) die "quickstart: no option $1; see bash tools/quickstart.sh --help" ;;
        *=*) SETTINGS+=("$1") ;;
        *) die "quickstart: '$1' is neither an option nor key=value; see bash tools/quickstart.sh --help" ;;
    esac
    shift
done
case "$CONFIG" in
    smollm2) MODEL=smollm2-135m-instruct DATA=sum20 ;;
    tiny) MODEL=tiny/model DATA=tiny/data ;;
    guess) MODEL=tiny/model DATA=guess ;;
    calculator) MODEL=tiny/model DATA=tiny/data ;;
    *) die "quickstart: --config is '$CONFIG'; allowed: smollm2, tiny, guess, calculator" ;;
esac
CACHE="$(realpath -m -- "$CACHE")"
cd "$PROJECT" # the paths in configs/ are relative to it
if [ -n "$RUN" ]; then SETTINGS+=("run.dir=$RUN"); else RUN="runs/${CONFIG}_cpu"; fi
if [ "$CACHE" != "$PROJECT/.cache" ]; then
    SETTINGS+=("model.path=$CACHE/$MODEL" "data.train=$CACHE/$DATA/train.jsonl" "data.eval=$CACHE/$DATA/eval.jsonl")
fi

bash tools/setup_env.sh
GSPO="$VENV/bin/gspo-hpc"

say "model and data in $CACHE"
if [ "$CONFIG" != smollm2 ]; then
    "$PYTHON" tools/make_tiny_model.py --out "$CACHE/tiny"
    [ "$CONFIG" != guess ] || [ -f "$CACHE/$DATA/eval.jsonl" ] || "$PYTHON" tools/make_games.py --out "$CACHE/$DATA"
else
    "$PYTHON" tools/prepare_smollm2.py --out "$CACHE/$MODEL"
    [ -f "$CACHE/$DATA/eval.jsonl" ] || "$PYTHON" tools/make_arithmetic.py --out "$CACHE/$DATA" --kind "$DATA"
fi

say "training (you can interrupt it: the same command resumes it)"
"$GSPO" train "configs/${CONFIG}_cpu.yaml" "${SETTINGS[@]}"

say "report"
"$GSPO" report "$RUN"

say "what the model learned"
"$PYTHON" tools/lib/learned.py "$RUN"
