#!/usr/bin/env bash
# AL of a head of train.sh beside another one's by category and K, its model card, and digests. See README.md.
set -euo pipefail
work=${WORK:-/tmp/coder} head=${HEAD:-peagle} against=${AGAINST:-eagle3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1
peagle() { python3 -m deployments.cli "$@"; }
peagle evaluate "$work/$head/head" "$work/answers" --target "$work/target" --against "$work/$against/head" --out "$work/evaluation-$head"
peagle publish "$work/$head/head" --repo YOUR_ORG/Qwen2.5-Coder-1.5B-Instruct-P-EAGLE --base-model Qwen/Qwen2.5-Coder-1.5B-Instruct \
  --note "Trained on, and measured with, the target's Q4_K_M weights taken back to bfloat16." --dry-run
sha256sum "$work"/{"$head","$against"}/head/* > "$work/digests-$head"
