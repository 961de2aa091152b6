#!/usr/bin/env bash
# A learner and two rollout workers on this machine: ./launch/async_local.sh [--config.field=value ...]
# One command starts all of them. One worker is killed while it samples, and Ray restarts it. At the end the
# script reports how many sequences other workers continued, and whether every batch was complete.
#
# Examples:
#   ./launch/async_local.sh
#   ./launch/async_local.sh --config.steps=20
set -euo pipefail
# shellcheck source=launch/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
prepare_venv "ray"

unset RAY_ADDRESS  # the killed worker has to be a process of this machine
mkdir -p runs
workdir=$(mktemp -d runs/async_local.XXXXXX)
"$PY" -m jaxrl_tis.main --config=configs/async_local.py --workdir="$workdir" "$@" &
learner=$!
trap 'kill "$learner" 2>/dev/null || true' EXIT

"$PY" launch/async_local.py kill "$workdir" "$learner"
wait "$learner"
"$PY" launch/async_local.py report "$workdir"
