#!/usr/bin/env bash
# What engine and service do on one GPU of 140 GB, about an hour: the published models' shapes, drafts, learned K, a head
# that learns beside the service, tokens/s over HTTP. From the repository's root, all or some of its steps:
#
#   [WORK=/tmp/peagle-gpu] bash benchmarks/gpu.sh [models] [drafts] [engines] [learning] [http]
set -uo pipefail
work=${WORK:-/tmp/peagle-gpu}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONFAULTHANDLER=1 RAY_USAGE_STATS_ENABLED=0
mkdir -p "$work"

run() {  # name, seconds, program of benchmarks, its arguments; one that hangs leaves the stacks of its processes in the log
  local name=$1 limit=$2; shift 2
  echo "[$(date +%T)] $name"
  timeout -s ABRT -k 15 "$limit" python3 -m "benchmarks.$1" "${@:2}" > "$work/$name.log" 2>&1 && return
  echo "failed: $? ($work/$name.log)"; return 1
}

models() {
  local shape
  for shape in GPT_OSS_120B GPT_OSS_20B QWEN3_CODER_30B_FP8 GEMMA_4_31B; do
    run "model-$shape" 420 check_models --shape $shape --out "$work/model-$shape.json"
  done
}

drafts() {
  for phase in plain drafts; do
    run "check-$phase" 300 check_drafts --phase $phase --dtype float16 --backend FLASH_ATTN --out "$work/check-drafts.json"
  done
}

engines() {
  engine() { run "engine-$1" 420 engines --arm "$1" --seconds 3 --out "$work/engine-$1.json" "${@:2}"; }
  engine peagle-7 --depths learned 7 5 3 --mixed-requests 1 8 32 64 128 256
  for arm in eagle3-5 eagle3-3 eagle3-7 none; do engine $arm; done
}

learning() {
  cat > "$work/learning.yaml" <<'Y'
applications:
  - args:
      model: {id: smollm2-135m-instruct, source: smollm2-135m-instruct}
      drafter:
        head: smollm2-135m-instruct
        placement: remote
        max_draft_tokens: 7
        replicas: {num_cpus: 0.1, num_gpus: 0.2, cache_gib: 4, host: 127.0.0.1}
      engine:
        dtype: bfloat16
        max_model_len: 2048
        max_num_seqs: 64
        gpu_memory_utilization: 0.1
        kv_cache_memory_bytes: 4000000000
      target: {num_replicas: 1, num_cpus: 0.1, bundle: {GPU: 0.4}}
      ingress: {num_cpus: 0.1}
Y
  # The first round waits until half of what is new came after the shift.
  run learning 600 learning --config "$work/learning.yaml" --learning '{num_gpus: 0.3, min_new_answers: 1600}' \
    --num-clients 32 --num-before 800 --num-held-out 192 --pause-s 0 --max-s 300 --out "$work/learning.json" \
    || tar czf "$work/learning-ray.tgz" -C /tmp/ray/session_latest logs
}

http() {
  local tokenizer sizes settings
  tokenizer=$(python3 -c 'from peagle.embedded import DEFAULT_TARGET, prepare_target; print(prepare_target(DEFAULT_TARGET))')
  sizes=$(python3 -c 'from peagle.vllm.engine import capture_sizes; print(capture_sizes(256 * 8))')
  settings='{"dtype":"bfloat16","max_model_len":4096,"max_num_seqs":256,"max_num_batched_tokens":8192,"gpu_memory_utilization":0.08,
    "kv_cache_memory_bytes":12000000000,"enable_prefix_caching":false,"generation_config":"vllm","cudagraph_capture_sizes":'$sizes'}'
  arms() {  # name, arms: a server of this shape takes 34 GB, so four at a time
    run "headline-$1" 1000 headline --shape LLAMA_8B --tokenizer "$tokenizer" --gpus 0 --engine "$settings" --arms "${@:2}" \
      --dataset "--dataset-name random --random-input-len 128 --random-output-len 256 --random-range-ratio 0.5 --ignore-eos" \
      --batch-table '[[1,16,7],[17,64,3],[65,256,1]]' --repeats 2 --max-cell-s 90 \
      --folder "$work/headline-$1" --out "$work/headline-$1.json"
  }
  arms first none ours-0 eagle3-3 ours-7
  arms second none eagle3-7 table-7 ours-7
}

for step in "${@:-models drafts engines learning http}"; do
  for name in $step; do "$name"; done
done
