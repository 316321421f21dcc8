#!/usr/bin/env bash
# From a fresh checkout to answers: .venv, installation, and a batch job over examples/prompts.jsonl on the demo model.
# Runs on a CPU with two cores in a few minutes; a second run uses what the first one made. Works from any directory.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
cd "$ROOT"
started=$SECONDS

MODEL=examples/demo-model
INPUT=examples/prompts.jsonl
EXPECTED=examples/expected.jsonl
OUTPUT=out/answers.jsonl
export HF_HUB_OFFLINE=1

ensure_venv

mkdir -p out
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
.venv/bin/python scripts/summarise_answers.py --input="$INPUT" --output="$OUTPUT" --expected="$EXPECTED" --min_right=0.8
