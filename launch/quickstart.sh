#!/usr/bin/env bash
# Runs the quickstart from a bare clone: ./launch/quickstart.sh [moe|tool] [--compare] [--config.field=value ...]
# With moe the model has experts (configs/quickstart_moe.py), with tool it learns to call a calculator
# (configs/quickstart_tool.py). --compare also runs the config's other variants with the same seed. One
# report overlays all four.
#
# Examples:
#   ./launch/quickstart.sh
#   ./launch/quickstart.sh moe --compare
set -euo pipefail
# shellcheck source=launch/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
prepare_venv ""

name=quickstart
variants=(tis off centered f32)
if [ "${1:-}" = moe ]; then
  name=quickstart_moe
  variants=(r3 none icepop r2)
  shift
elif [ "${1:-}" = tool ]; then
  name=quickstart_tool
  variants=(tis gap_tis gap_turn gap_off)
  shift
fi
if [ "${1:-}" = "--compare" ]; then shift; else variants=("${variants[0]}"); fi
workdirs=()
for variant in "${variants[@]}"; do
  workdir=runs/$name-$variant
  echo "running configs/$name.py:$variant in $workdir"
  "$PY" -m jaxrl_tis.main --config="configs/$name.py:$variant" --workdir="$workdir" "$@"
  workdirs+=("$workdir")
done
if [ "${#workdirs[@]}" -gt 1 ]; then
  "$PY" -m jaxrl_tis.report "${workdirs[@]}" --out "runs/$name-compare.html"
fi
