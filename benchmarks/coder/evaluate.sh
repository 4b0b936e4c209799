#!/usr/bin/env bash
# AL of both heads of train.sh by category and K, the P-EAGLE head's model card, and digests. See README.md.
set -euo pipefail
work=${WORK:-/tmp/coder}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1
peagle() { python3 -m deployments.cli "$@"; }
peagle evaluate "$work/peagle/head" "$work/answers" --target "$work/target" --against "$work/eagle3/head" --out "$work/evaluation"
peagle publish "$work/peagle/head" --repo YOUR_ORG/Qwen2.5-Coder-1.5B-Instruct-P-EAGLE --base-model Qwen/Qwen2.5-Coder-1.5B-Instruct \
  --note "Trained on, and measured with, the target's Q4_K_M weights taken back to bfloat16." --dry-run
sha256sum "$work"/{peagle,eagle3}/head/* > "$work/digests"
