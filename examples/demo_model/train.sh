#!/bin/sh
# Makes the target's text and all draft heads of the demo model: sh examples/demo_model/train.sh [HEAD...]
# A run that was stopped continues where it was. Everything is written below $WORK, by default build/demo_model.
# $ENTRIES answers are made of the sources in $TEXT; $STEPS is the length of each run in place of its file's. A rehearsal:
#     ENTRIES=16 STEPS=2 WORK=build/rehearsal TEXT=eyas/train sh examples/demo_model/train.sh
# "target" in place of heads trains another target on the sources. Heads for it, and not for the one that is here:
#     TARGET=build/demo_model/target WORK=build/mine sh examples/demo_model/train.sh
# "all" does both: a target, then heads for it, below $WORK.
set -eu
eyas=${EYAS:-.venv/bin/eyas}
target=${TARGET:-models/demo/target}
heldout=models/demo/heldout_modules.json
text=${TEXT:-$("$(dirname "$eyas")/python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')}
work=${WORK:-build/demo_model}
mkdir -p "$work"

if [ "$*" = all ]; then
    sh "$0" target
    TARGET=$work/target WORK=$work/heads sh "$0"
    exit
fi

if [ "$*" = target ]; then
    [ -f "$work/sources/prepared.json" ] || "$eyas" train prepare "$text" --model "$target" --out "$work/sources" \
        --exclude "$heldout" --max-length 256
    "$eyas" train run --config examples/demo_model/target.yaml --set "model=$target" --set "data.path=$work/sources" \
        --set "out=$work/target-run" ${STEPS:+--set "optimizer.max_steps=$STEPS" --set eval.every=0}
    mkdir -p "$work/target"
    cp "$work/target-run/last"/* "$target"/tokenizer* "$target/chat_template.jinja" "$work/target"
    exit
fi

# Half of the answers are greedy, half sampled at temperature 1. Packages beside the library are continued, too. A head sees
# few sources beside the answers: the modules at the top of the folder.
"$eyas" train regenerate "$text" --model "$target" --out "$work/answers.jsonl" --exclude "$heldout" \
    --dtype float32 --prompt-tokens 64 --max-tokens 192 --prompts-per-document 4 --max-entries "${ENTRIES:-16000}" --threads 1
[ -f "$work/data/prepared.json" ] || "$eyas" train prepare "$work/answers.jsonl" "$text"/*.py --model "$target" \
    --out "$work/data" --exclude "$heldout" --max-length 256

for head in ${*:-dspark peagle eagle3-full eagle3 eagle1 medusa hydra small}; do
    "$eyas" train run --config "examples/demo_model/$head.yaml" --set "model=$target" --set "data.path=$work/data" --set "out=$work/$head" \
        ${STEPS:+--set "optimizer.max_steps=$STEPS" --set eval.every=0 --set eval.num_prompts=1 --set eval.max_tokens=16}
done
