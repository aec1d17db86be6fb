#!/bin/sh
# JSON mode on a GPU, in one command:   benchmarks/structured_gpu.sh CFG_DIR TOKENIZER_DIR OUT_DIR [TARGET_PERCENT]
#
# CFG_DIR has a config.json (weights are random, of that shape), TOKENIZER_DIR a tokenizer.json; make the latter
# with `python -m benchmarks.structured --write-tokenizer DIR` where the default model is.
# First what the sampler's own graph costs steps without masks, then what constraints cost at 32 rows.
set -u
config=$1 tokenizer=$2 out=$3 target=${4:-5}
name=$(basename "$config")
mkdir -p "$out"
status=0
python -m benchmarks.sampler_graph "$config" --rows 1 32 --repeats 7 --steps 300 --allow-dirty \
    --out "$out/sampler-graph-$name.json" || status=$?
python -m benchmarks.structured "$config" --random --tokenizer "$tokenizer" --device cuda --rows 32 \
    --repeats 5 --target-percent "$target" --allow-dirty --out "$out/structured-$name.json" || status=$?
exit $status
