#!/usr/bin/env bash
# Checks and measures the package on one GPU, one TPU chip or the CPU: ./launch/accelerator.sh [NAME] [--smoke]
# Takes at most eight minutes after the installation, and downloads nothing meanwhile. The report goes to
# docs/accelerators/NAME.json (default: the name of this host), its tables to docs/accelerators.md. Ends
# with 1 if logits, kernels or the gate fail. EXTRA=cuda12, cuda13, tpu or nothing chooses the packages
# of jax (default: by the devices of this machine). With --smoke all sizes are tiny.
#
# Examples:
#   ./launch/accelerator.sh h100
#   EXTRA=cuda13 ./launch/accelerator.sh
set -euo pipefail
# shellcheck source=launch/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
extra=""
if compgen -G "/dev/nvidia[0-9]*" >/dev/null; then
  extra=cuda12
elif compgen -G "/dev/accel*" >/dev/null || compgen -G "/dev/vfio/[0-9]*" >/dev/null; then
  extra=tpu
fi
prepare_venv "${EXTRA-$extra}"

name=$(hostname)
if [[ "${1:---}" != --* ]]; then name=$1 && shift; fi
report=docs/accelerators/$name.json
code=0
"$PY" -m benchmarks.accelerator --json="$report" "$@" || code=$?
[ -f "$report" ] && "$PY" docs/make_accelerators.py
exit "$code"
