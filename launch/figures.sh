#!/usr/bin/env bash
# Makes the figures of docs/experiments.md: ./launch/figures.sh [NAME ...] [--smoke]; all figures
# without names. With --smoke no run is trained: the runs are listed, and the stored records are drawn.
# Finished runs are not repeated. Two runs share the machine, one core each; JOBS=4 runs four.
# lora_smollm2 trains SmolLM2-135M for an hour or more, and referee trains 1,024 small runs for some hours; these
# two are not among "all figures".
#
# Examples:
#   ./launch/figures.sh rescue
#   JOBS=4 ./launch/figures.sh
set -euo pipefail
# shellcheck source=launch/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
prepare_venv ""

failed=0 smoke=""
if [ "${!#}" = --smoke ]; then smoke=1 && set -- "${@:1:$#-1}"; fi
trained=(rescue critic threshold staleness formats causes routing lora)
by_name=(lora_smollm2)
computed=(parallelism budget frontier router_noise router_noise_trained turns)
[ $# -gt 0 ] || set -- "${trained[@]}" "${computed[@]}" predictor

referee() {  # its runs and gradients; one process for each part, each on a core of its own
  local parts what
  for what in runs gradients; do
    parts=$("$PY" -c "from experiments.referee_$what import PARTS; print(*PARTS, sep='\n')")
    # shellcheck disable=SC2016  # the inner shell has SLOT
    xargs -P "${JOBS:-2}" --process-slot-var=SLOT -I PART sh -c \
      'exec taskset -c "$((SLOT % $(nproc)))" "$0" -m "experiments.referee_$1" "$2"' \
      "$PY" "$what" PART <<<"$parts" || failed=1
  done
}

sweep() {  # of the arms of $name with $seeds
  "$PY" -m jaxrl_tis.sweep --config="configs/fig_$name.py" --seeds="$seeds" --jobs="${JOBS:-2}" \
    --out="runs/figures/$name" "$@"
}

for name in "$@"; do
  seeds=0,1,2,3,4
  if [ "$name" = causes ]; then seeds=0,1,2,3,4,5,6,7,8,9; fi
  if [ "$name" = routing ]; then seeds=0,1; fi
  if [ "$name" = lora_smollm2 ]; then seeds=0,1; fi
  if [ -n "$smoke" ]; then
    if [[ " ${trained[*]} ${by_name[*]} " == *" $name "* ]]; then sweep --dry_run; fi
    # What is computed takes minutes.
    if [[ " ${computed[*]} " != *" $name "* ]]; then "$PY" -m "experiments.$name"; fi
    continue
  fi
  if [ "$name" = lora_smollm2 ]; then ./launch/smollm2.sh --fetch; fi
  if [[ " ${trained[*]} ${by_name[*]} " == *" $name "* ]]; then
    sweep || failed=1  # the others are drawn, and those that failed are named
    "$PY" -m experiments.records "runs/figures/$name" --out "docs/experiments/$name.jsonl"
  fi
  if [ "$name" = referee ]; then referee; fi
  case "$name" in
    frontier)
      "$PY" -m experiments.oracle --centred | tee docs/experiments/frontier.md
      "$PY" -m experiments.oracle --drift=0.1 --reward=mean --batch=10000 \
        --png=docs/experiments/frontier.png ;;
    parallelism)
      ./launch/smollm2.sh --fetch
      XLA_FLAGS=--xla_force_host_platform_device_count=8 "$PY" -m experiments.parallelism ;;
    *) "$PY" -m "experiments.$name" ;;
  esac
done
exit "$failed"
