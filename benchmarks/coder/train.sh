#!/usr/bin/env bash
# Heads for Qwen2.5-Coder-1.5B-Instruct: conversations by the target, then training, a head a GPU. See README.md.
# HEADS: NAME[:RECIPE[,section.key=value...]] each, RECIPE of configs/train/coder-RECIPE.yaml and by default the name.
set -euo pipefail
work=${WORK:-/tmp/coder}
read -ra heads <<< "${HEADS:-peagle eagle3}"
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
print("weights_digest", convert_gguf(Path(sys.argv[1]), out))
P
set_target=(target="$work/target" data="$work/data")

say "conversations, and answers to evaluate on"
cat "$PROMPTS"/humaneval.jsonl "$PROMPTS"/questions.jsonl > "$work/evaluate.jsonl"
workers=$(( ${#gpus[@]} > 2 ? 2 * ${#gpus[@]} : 4 ))
peagle generate configs/train/coder-peagle.yaml "${set_target[@]}" generate.num_workers=$workers \
  generate.num_conversations=$(( ${CONVERSATIONS:-36000} / workers )) > "$work/generate.log" 2>&1 & first=$!
[ -e "$work/answers/manifest.json" ] || peagle generate configs/train/coder-peagle.yaml "${set_target[@]}" --prompts "$work/evaluate.jsonl" --out "$work/answers" > "$work/answers.log" 2>&1 & second=$!
all $first $second
tail -1 "$work/generate.log"

train() {  # GPU, head
  local name=${2%%:*} rest recipe
  rest=${2#"$name"}; rest=${rest#:}; recipe=${rest%%,*}; rest=${rest#"$recipe"}
  CUDA_VISIBLE_DEVICES=$1 python3 -m deployments.cli train "configs/train/coder-${recipe:-$name}.yaml" "${set_target[@]}" output="$work/$name" \
    schedule.max_minutes="${MINUTES:-8}" evaluate.data="$work/answers" evaluate.held_out=0 ${STATES_DIR:+states_dir="$STATES_DIR"} \
    ${START:+drafter.start_from="$START/$name"} ${rest//,/ } > "$work/train-$name.log" 2>&1
}
say "training on ${#gpus[@]} GPUs: ${heads[*]}"
for ((i = 0; i < ${#heads[@]}; i += ${#gpus[@]})); do
  running=()
  for ((j = 0; j < ${#gpus[@]} && i + j < ${#heads[@]}; j++)); do
    train "${gpus[j]}" "${heads[i + j]}" & running+=($!)
  done
  all "${running[@]}"
done
say "heads are there"
