#!/bin/sh
# The calculator, from a random policy: warm start by SFT, then a few RL steps, in bfloat16.
#   sh tests/gpu/loop.sh PYTHON FOLDER cpu|cuda TRANSPORT SFT_STEPS RL_STEPS [OPTION OF THE RL RUN]...
set -eu
python=$1 folder=$2 device=$3 transport=$4 sft_steps=$5 rl_steps=$6
shift 6
outloop="$python -m outloop.cli"
# Those that SGLang's kernels are made for.
sizes="--head-size 64 --hidden-size 128"
[ "$device" != cpu ] || sizes=
$outloop new-policy --out "$folder/policy" $sizes --conversations tasks:conversations \
    --import-dir examples/calculator
$outloop train examples/calculator/warm_start.toml --set "run.dir=$folder" \
    --set "model.path=$folder/policy" --set "trainer.num_steps=$sft_steps" \
    --set "trainer.device=$device" --set trainer.dtype=bfloat16
$outloop train examples/calculator/run.toml --set "run.dir=$folder" --set eval.every=0 \
    --set "model.path=$folder/calculator-warm-start/hf" --set "trainer.num_steps=$rl_steps" \
    --set "trainer.device=$device" --set trainer.dtype=bfloat16 --set trainer.is_colocated=true \
    --set "server.device=$device" --set server.dtype=bfloat16 --set "publish.transport=$transport" \
    "$@"
$python - "$folder/calculator/metrics.jsonl" <<'END'
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
last = [row for row in rows if "train/loss" in row][-1]
names = ("train/samples", "train/reward_mean", "train/logprob_gap_mean", "train/logprob_gap_max",
         "train/tokens_per_s_per_rank", "train/mfu", "train/memory_peak_bytes",
         "publish/duration_s", "publish/pause_s", "publish/peak_extra_buckets")
print("INFO last step:", ", ".join(f"{name} {last[name]}" for name in names if name in last))
END
