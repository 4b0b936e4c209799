#!/usr/bin/env bash
# The table over HTTP with the heads of train.sh, on the same host. See README.md.
# ARMS, CELLS, GPUS: others. HEAD: another P-EAGLE head. STOCK_SITE: packages with another vLLM for `vllm serve`.
# REPEATS, WAVES, TOGETHER (servers that run at a time, to spare memory): of headline.py. MAX_S: ends it then, with the cells it has.
set -euo pipefail
work=${WORK:-/tmp/coder}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} VLLM_USE_FLASHINFER_SAMPLER=0 RAY_USAGE_STATS_ENABLED=0 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
gpus=(${GPUS:-$(nvidia-smi -L | sed -n 's/^GPU \([0-9]*\):.*/\1/p')})
sizes=$(python3 -c 'from peagle.vllm.engine_settings import capture_sizes; print(*capture_sizes(256 * 8), sep=",")')  # in all arms
engine='{"dtype":"bfloat16","max_model_len":20480,"max_num_seqs":256,"max_num_batched_tokens":8192,"gpu_memory_utilization":0.1,"kv_cache_memory_bytes":'${KV:-7000000000}',"generation_config":"vllm","cudagraph_capture_sizes":['$sizes']}'
arms="none eagle3-3x4 eagle3-5x4 eagle3-7x4 eagle3-7vx4 ngram-5x4 ours-7"
# In the order of what they tell: a run that is cut short has all arms in every cell it has.
cells="humaneval:1,8 mixed@0.7:8 humaneval:32,64,128,256 questions:8,64 prefix:8,64 long:4,8 mixed@0.7:1,64 humaneval:2,4,16 questions:1 long:1"
${MAX_S:+timeout -s TERM "$MAX_S"} python3 -m benchmarks.headline --model "$work/target" --peagle-head "$work/${HEAD:-peagle}/head" --eagle3-head "$work/eagle3/head" \
  ${STOCK_SITE:+--stock-site "$STOCK_SITE"} --gpus ${gpus[*]} ${TOGETHER:+--together "$TOGETHER"} --arms ${ARMS:-$arms} \
  --prompts "$PROMPTS" --cells ${CELLS:-$cells} --repeats "${REPEATS:-2}" --waves "${WAVES:-12}" --min-prompts 24 --max-tokens 256 --warm-tokens 48 \
  --max-ready-s "${MAX_READY_S:-600}" --max-cell-s 200 \
  --engine "$engine" --folder "$work/headline" --out "$work/headline.json"
