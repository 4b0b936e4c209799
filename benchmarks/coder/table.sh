#!/usr/bin/env bash
# The headline's table with the heads of train.sh, on the same host. SET=first|second. See README.md.
# CELLS: other cells; groups of them, with a slash between, go to the GPUs in turn, each with servers of its own.
# EXTRA: further engine settings of all arms as JSON, such as '"additional_config":{"peagle_prompt_graphs":false}' (ours).
# HEAD, ARMS: another P-EAGLE head, other arms. REPEATS, WAVES: of headline.py. MAX_S: ends it then, with the cells it has.
set -euo pipefail
work=${WORK:-/tmp/coder}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} VLLM_USE_FLASHINFER_SAMPLER=0 RAY_USAGE_STATS_ENABLED=0 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
gpus=($(nvidia-smi -L | sed -n 's/^GPU \([0-9]*\):.*/\1/p'))
sizes=$(python3 -c 'from peagle.vllm.engine import capture_sizes; print(*capture_sizes(256 * 8), sep=",")')  # in all arms
engine='{"dtype":"bfloat16","max_model_len":20480,"max_num_seqs":256,"max_num_batched_tokens":8192,"gpu_memory_utilization":0.1,"kv_cache_memory_bytes":'${KV:-7000000000}',"enable_prefix_caching":false,"generation_config":"vllm","cudagraph_capture_sizes":['$sizes']'${EXTRA:+,$EXTRA}'}'
set=${SET:-first}
case $set in
first)   # cells in the order of what they tell: a run that is cut short has all arms in every cell it has
  arms="none eagle3-5 eagle3-7 ours-7"  # EAGLE-3 with K = 3 was the best stock arm in no cell so far
  cells="humaneval:1,8 long:4 mixed@0.7:8 questions:8 humaneval:2,4,16 questions:1 mixed@0.7:1 long:1,8"
  cells+="/humaneval:64,32,128,256 questions:64 mixed@0.7:64" ;;
second)  # the rest of the arms against none and ours: stock-7 and ngram-5 were the best stock arm in no cell so far
  arms="none stock-7 ngram-5 table-5 ${DRAFT:+draft-5} ours-0 ours-7"
  [ "${#gpus[@]}" -lt 2 ] || arms="$arms remote-7"
  python3 -c 'import arctic_inference' 2>/dev/null && arms="$arms suffix"
  cells="humaneval:1,8,32,128 mixed@0.7:8" ;;
esac
IFS=/ read -ra groups <<< "${CELLS:-$cells}"
table() {  # name, GPUs, first port, cells
  ${MAX_S:+timeout -s TERM "$MAX_S"} python3 -m benchmarks.headline --model "$work/target" --peagle-head "$work/${HEAD:-peagle}/head" --eagle3-head "$work/eagle3/head" \
    ${DRAFT:+--draft-model "$DRAFT"} --batch-table '[[1,16,5],[17,64,3],[65,256,1]]' --gpus $2 --first-port "$3" --arms ${ARMS:-$arms} \
    --prompts "$PROMPTS" --cells $4 --repeats "${REPEATS:-2}" --waves "${WAVES:-12}" --min-prompts 24 --max-tokens 256 --warm-tokens 48 \
    --max-ready-s "${MAX_READY_S:-600}" --max-cell-s 200 \
    --engine "$engine" --folder "$work/headline-$1" --out "$work/headline-$1.json"
}
if [ "$set" = second ]; then
  table second "${gpus[*]}" 8000 "${groups[*]}"
  exit
fi
running=()
for ((i = 0; i < ${#gpus[@]} && i < ${#groups[@]}; i++)); do
  mine=()
  for ((j = i; j < ${#groups[@]}; j += ${#gpus[@]})); do mine+=("${groups[j]}"); done
  table "$set$( ((i)) && echo "-$((i + 1))" || true)" "${gpus[i]}" $((8000 + 200 * i)) "${mine[*]}" & running+=($!)
done
for process in "${running[@]}"; do wait "$process" || true; done
