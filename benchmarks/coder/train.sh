#!/usr/bin/env bash
# Heads for Qwen2.5-Coder-1.5B-Instruct: conversations, both heads, AL. See README.md.
set -euo pipefail
work=${WORK:-/tmp/coder}
minutes=${MINUTES:-6}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} VLLM_USE_FLASHINFER_SAMPLER=0 RAY_USAGE_STATS_ENABLED=0 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 CI=1
mkdir -p "$work"
peagle() { python3 -m deployments.cli "$@"; }
num_gpus=$(nvidia-smi -L | wc -l)
say() { echo "[$(date +%T)] $*"; }

say "target"
[ -e "$work/target/config.json" ] || python3 - "$GGUF" "$work/target" <<'P'
import sys
from pathlib import Path
from peagle.embedded import convert_gguf
out = Path(sys.argv[2]); out.mkdir(parents=True, exist_ok=True)
print("weights_digest", convert_gguf(Path(sys.argv[1]), out, splits_digits=False))
P
set_target=(target="$work/target" data="$work/data")

say "conversations"
peagle generate configs/train/coder-peagle.yaml "${set_target[@]}" generate.num_rounds="${ROUNDS:-1}" > "$work/generate.log" 2>&1
tail -1 "$work/generate.log"

say "answers to evaluate on"
cat "$PROMPTS"/humaneval.jsonl "$PROMPTS"/questions.jsonl > "$work/evaluate.jsonl"
peagle generate configs/train/coder-peagle.yaml "${set_target[@]}" --prompts "$work/evaluate.jsonl" --out "$work/answers" > "$work/answers.log" 2>&1

train() {  # name, GPU
  CUDA_VISIBLE_DEVICES=$2 python3 -m deployments.cli train "configs/train/coder-$1.yaml" "${set_target[@]}" output="$work/$1" \
    schedule.max_minutes="$minutes" evaluate.data="$work/answers" > "$work/train-$1.log" 2>&1
}
say "training, $minutes minutes each, $num_gpus GPUs"
if [ "$num_gpus" -ge 2 ]; then
  train peagle 0 & first=$!
  train eagle3 1 & second=$!
  wait "$first"; wait "$second"
else
  train peagle 0; train eagle3 0
fi
say "AL"
peagle evaluate "$work/peagle/head" "$work/answers" --target "$work/target" --against "$work/eagle3/head" --out "$work/evaluation" | tee "$work/evaluate.log"
peagle publish "$work/peagle/head" --repo YOUR_ORG/Qwen2.5-Coder-1.5B-Instruct-P-EAGLE --base-model Qwen/Qwen2.5-Coder-1.5B-Instruct \
  --note "Trained on, and measured with, the target's Q4_K_M weights taken back to bfloat16." --dry-run
sha256sum "$work"/{peagle,eagle3}/head/* > "$work/digests"
say "heads are there"; touch "$work/trained"
