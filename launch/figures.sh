#!/usr/bin/env bash
# Makes the figures of docs/experiments.md: ./launch/figures.sh [NAME ...] [--smoke]; all figures
# without names. With --smoke no run is trained: the runs are listed, and the stored records are drawn.
# Finished runs are not repeated. Two runs share the machine, one core each; JOBS=4 runs four.
# lora_smollm2 trains SmolLM2-135M for an hour or more, referee, referee_factors and referee_objectives train 1,024,
# 424 and 464 small runs for some hours, mismatch and lag hours and a day, and engines installs vLLM in .venv-vllm
# (3 GB) and trains with it: these seven are not among "all figures".
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
listed=$("$PY" -m experiments.figures)  # lines: a name, and the seeds of its runs or "computed" or "stored"
if [ $# -eq 0 ]; then
  # shellcheck disable=SC2046  # a word for each name
  set -- $(awk '$1 !~ /^(lora_smollm2|engines|referee|mismatch|lag)/ { print $1 }' <<<"$listed") frontier
fi

referee() {  # its runs as $2 says, of the parts in the tuple $1; one process for each, on a core of its own
  local parts
  parts=$("$PY" -c "from experiments import referee_runs; print(*referee_runs.$1, sep='\n')")
  # shellcheck disable=SC2016  # the inner shell has SLOT
  xargs -P "${JOBS:-2}" --process-slot-var=SLOT -I PART sh -c \
    'exec taskset -c "$((SLOT % $(nproc)))" "$0" -m experiments.referee_runs $1 "$2"' \
    "$PY" "${2:-}" PART <<<"$parts" || failed=1
}

sweep() {  # of the arms of $name with $seeds
  "$PY" -m jaxrl_tis.sweep --config="configs/fig_$name.py" --seeds="$seeds" --jobs="${JOBS:-2}" \
    --out="runs/figures/$name" "$@"
}

for name in "$@"; do
  if [ "$name" = frontier ]; then
    [ -z "$smoke" ] || continue
    "$PY" -m experiments.oracle --centred | tee docs/experiments/frontier.md
    "$PY" -m experiments.oracle --drift=0.1 --reward=mean --batch=10000 --png=docs/experiments/frontier.png
    continue
  fi
  seeds=$(awk -v name="$name" '$1 == name { print $2 }' <<<"$listed") from=()
  if [ -n "$smoke" ]; then
    [[ "$seeds" != [0-9]* ]] || sweep --dry_run
    [ "$seeds" != computed ] || continue  # for minutes
    [[ "$seeds" != [0-9]* ]] || [ -f "docs/experiments/$name.jsonl" ] || continue  # no run yet
  else
    case "$name" in lora_smollm2 | parallelism | engines) ./launch/smollm2.sh --fetch ;; esac
    case "$name" in
      engines)
        prepare_venv tasks,serve,engines
        launch/vllm.sh install .venv-vllm
        "$PY" -m experiments.engines .venv-vllm || failed=1
        ;;
      contexts | drafter | fusion) "$PY" -m "experiments.$name" || { failed=1 && continue; } ;;
      referee) referee PARTS && referee GRADIENT_PARTS --gradients ;;
      referee_factors) referee FACTOR_PARTS --factors ;;
      referee_objectives) referee OBJECTIVE_PARTS --objectives ;;
    esac
    if [[ "$seeds" = [0-9]* ]]; then
      sweep || failed=1  # the others are drawn, and those that failed are named
      from=("--runs=runs/figures/$name")
    fi
  fi
  flags=${XLA_FLAGS:-}
  if [ "$name" = parallelism ]; then flags=--xla_force_host_platform_device_count=8; fi
  XLA_FLAGS=$flags "$PY" -m experiments.figures "$name" ${from[@]+"${from[@]}"}
done
exit "$failed"
