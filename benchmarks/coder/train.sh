#!/usr/bin/env bash
# Both heads for Qwen2.5-Coder-1.5B-Instruct: conversations by the target, then training. See README.md.
set -euo pipefail
work=${WORK:-/tmp/coder}
minutes=${MINUTES:-8} minutes_eagle3=${MINUTES_EAGLE3:-${MINUTES:-8}}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} VLLM_USE_FLASHINFER_SAMPLER=0 RAY_USAGE_STATS_ENABLED=0 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 CI=1
mkdir -p "$work"
peagle() { python3 -m deployments.cli "$@"; }
gpus=($(nvidia-smi -L | sed -n 's/^GPU \([0-9]*\):.*/\1/p'))
say() { echo "[$(date +%T)] $*"; }
all() { local status=0; for process in "$@"; do wait "$process" || status=1; done; return $status; }

say "target"
[ -e "$work/target/config.json" ] || python3 - "$GGUF" "$work/target" <<'P'
import sys
from pathlib import Path
from peagle.embedded import convert_gguf
out = Path(sys.argv[2]); out.mkdir(parents=True, exist_ok=True)
print("weights_digest", convert_gguf(Path(sys.argv[1]), out, splits_digits=False))
P
set_target=(target="$work/target" data="$work/data")

say "conversations, and answers to evaluate on"
cat "$PROMPTS"/humaneval.jsonl "$PROMPTS"/questions.jsonl > "$work/evaluate.jsonl"
peagle generate configs/train/coder-peagle.yaml "${set_target[@]}" ${ROUNDS:+generate.num_rounds="$ROUNDS"} > "$work/generate.log" 2>&1 & first=$!
peagle generate configs/train/coder-peagle.yaml "${set_target[@]}" --prompts "$work/evaluate.jsonl" --out "$work/answers" > "$work/answers.log" 2>&1 & second=$!
all $first $second
tail -1 "$work/generate.log"

train() {  # name, GPU, minutes
  CUDA_VISIBLE_DEVICES=$2 python3 -m deployments.cli train "configs/train/coder-$1.yaml" "${set_target[@]}" output="$work/$1" \
    schedule.max_minutes="$3" evaluate.data="$work/answers" ${STATES_DIR:+states_dir="$STATES_DIR"} \
    ${START:+drafter.start_from="$START/$1"} > "$work/train-$1.log" 2>&1
}
say "training, $minutes and $minutes_eagle3 minutes, on ${#gpus[@]} GPUs"
if [ "${#gpus[@]}" -gt 1 ]; then
  train peagle "${gpus[0]}" "$minutes" & first=$!
  train eagle3 "${gpus[1]}" "$minutes_eagle3" & second=$!
  all $first $second
else
  train peagle "${gpus[0]}" "$minutes"
  train eagle3 "${gpus[0]}" "$minutes_eagle3"
fi
say "heads are there"
