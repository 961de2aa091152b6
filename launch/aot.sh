#!/usr/bin/env bash
# Compiles the TPU configs at full size, without a TPU: ./launch/aot.sh [folder for logs and JSON]
# Writes their tables to docs/tpu_programs.md. About 20 minutes on two cores.
#
# Examples:
#   ./launch/aot.sh
#   ./launch/aot.sh runs/aot-new
set -euo pipefail
# shellcheck source=launch/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
prepare_venv tpu
out=${1:-runs/aot}
mkdir -p "$out"
version() { "$PY" -c "import importlib.metadata as m; print(m.version('$1'))"; }
cat >"$out/page.md" <<PAGE
# Programs of the shipped configs

Written by \`./launch/aot.sh\` with jax $(version jax) and libtpu $(version libtpu). Facts of the
compiler and outputs of a model; nothing was timed on a TPU. [tpu.md](tpu.md) explains the columns.
PAGE
for config in gsm8k_qwen25_0p5b:grpo gsm8k_qwen25_0p5b:ppo dapo_qwen25_32b dapo_qwen25_32b:async \
  dapo_qwen3_8b; do
  file=configs/${config%%:*}.py
  [[ $config == *:* ]] && file+=:${config#*:}
  echo "== $config (log in $out/$config.log)"
  "$PY" -m jaxrl_tis.aot --config="$file" --json="$out/$config.json" --markdown \
    2>"$out/$config.err" >"$out/$config.log" || { tail "$out/$config.log" "$out/$config.err" >&2; exit 1; }
  # The first line is a title; of the rest, the tables.
  printf "\n## \`%s\`\n\n" "$file" >>"$out/page.md"
  awk 'NR == 1; /^\|/ && !table { print "" } { table = /^\|/ } table' "$out/$config.log" |
    tee -a "$out/page.md"
done
mv "$out/page.md" docs/tpu_programs.md
