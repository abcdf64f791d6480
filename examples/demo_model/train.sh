#!/bin/sh
# Makes the target's text and all draft heads of the demo model: sh examples/demo_model/train.sh [HEAD...]
# A run that was stopped continues where it was. Everything is written below build/demo_model.
set -eu
eyas=${EYAS:-.venv/bin/eyas}
target=models/demo/target
library=$("$(dirname "$eyas")/python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
work=build/demo_model
mkdir -p "$work"

# Half of the answers are greedy, half sampled at temperature 1. Packages beside the library count as its sources.
"$eyas" train regenerate "$library" --model "$target" --out "$work/answers.jsonl" --exclude models/demo/heldout_modules.json \
    --dtype bfloat16 --prompt-tokens 64 --max-tokens 192 --prompts-per-document 4 --max-entries 16000
[ -f "$work/data/prepared.json" ] || "$eyas" train prepare "$work/answers.jsonl" "$library" --model "$target" \
    --out "$work/data" --exclude models/demo/heldout_modules.json --max-length 256

for head in ${*:-dspark eagle3-full eagle3 eagle1 medusa hydra small}; do
    "$eyas" train run --config "examples/demo_model/$head.yaml"
done
