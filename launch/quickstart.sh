#!/usr/bin/env bash
# Runs the quickstart from a bare clone: ./launch/quickstart.sh [--compare]
# --compare also runs the same seed uncorrected, with centred scores, and with float32 rollouts. One
# report overlays all four.
#
# Examples:
#   ./launch/quickstart.sh
#   ./launch/quickstart.sh --compare
set -euo pipefail
# shellcheck source=launch/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
prepare_venv ""

variants=(tis)
[ "${1:-}" = "--compare" ] && variants=(tis off centered f32)
workdirs=()
for variant in "${variants[@]}"; do
  workdir=runs/quickstart-$variant
  echo "running configs/quickstart.py:$variant in $workdir"
  "$PY" -m jaxrl_tis.main --config="configs/quickstart.py:$variant" --workdir="$workdir"
  workdirs+=("$workdir")
done
if [ "${#workdirs[@]}" -gt 1 ]; then
  "$PY" -m jaxrl_tis.report "${workdirs[@]}" --out runs/quickstart-compare.html
fi
