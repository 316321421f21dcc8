#!/usr/bin/env bash
# From a fresh checkout to answers: .venv, installation, a demo checkpoint, and a batch job over examples/prompts.jsonl.
# Runs on a CPU with two cores in a few minutes; a second run uses what the first one made. Works from any directory.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
cd "$ROOT"
started=$SECONDS

MODEL=out/demo-checkpoint
INPUT=examples/prompts.jsonl
OUTPUT=out/answers.jsonl
export HF_HUB_OFFLINE=1

ensure_venv

step "Writing the demo checkpoint (random weights) to $MODEL"
.venv/bin/python scripts/make_demo_checkpoint.py --output="$MODEL"

step "Answering $(wc -l <"$INPUT") lines of $INPUT"
command=(
    .venv/bin/qwen35-generate
    --model="$MODEL" --input="$INPUT" --output="$OUTPUT" --overwrite
    --max_model_len=1024 --max_num_seqs=32 --max_num_batched_tokens=512
    --compilation_cache_dir=.cache/jax
)
printf '    %s\n' "${command[*]}"
"${command[@]}"

step "Done in $((SECONDS - started)) s"
.venv/bin/python scripts/summarise_answers.py --input="$INPUT" --output="$OUTPUT"
