#!/usr/bin/env bash
# Compiles the TPU configs at full size, without a TPU: ./launch/aot.sh [folder for logs and JSON]
# About 6 minutes on two cores; the tables of docs/tpu.md are its output.
set -euo pipefail
# shellcheck source=launch/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
prepare_venv tpu
out=${1:-runs/aot}
mkdir -p "$out"
for config in gsm8k_qwen25_0p5b:grpo gsm8k_qwen25_0p5b:ppo dapo_qwen25_32b dapo_qwen25_32b:async \
  dapo_qwen3_8b; do
  file=configs/${config%%:*}.py
  [[ $config == *:* ]] && file+=:${config#*:}
  echo "== $config (log in $out/$config.log)"
  "$PY" -m jaxrl_tis.aot --config="$file" --json="$out/$config.json" --markdown \
    2>"$out/$config.err" | tee "$out/$config.log" | grep '^|' ||
    { tail "$out/$config.err" >&2; exit 1; }
done
