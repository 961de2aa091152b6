#!/usr/bin/env bash
# A learner and two rollout workers as processes of this machine: ./launch/async_local.sh [--config.field=value ...]
# One worker is killed while it samples, and its supervisor restarts it. At the end the script reports how
# many sequences other workers continued, and whether every batch was complete.
#
# Examples:
#   ./launch/async_local.sh
#   ./launch/async_local.sh --config.steps=20
set -euo pipefail
# shellcheck source=launch/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
prepare_venv ""

mkdir -p runs
workdir=$(mktemp -d runs/async_local.XXXXXX)
port=$("$PY" -c 'import socket
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1])')
shared=(--config=configs/async_local.py "--config.rollout.listen=127.0.0.1:$port" "$@")

worker() {  # name
  "$PY" launch/supervise.py --state="$workdir/$1.json" -- "$PY" -m jaxrl_tis.worker "${shared[@]}" \
    --learner="127.0.0.1:$port" --name="$1" --partial_seconds=0.02 >"$workdir/$1.log" 2>&1 &
}

running=()
trap 'kill "${running[@]}" 2>/dev/null || true' EXIT
"$PY" -m jaxrl_tis.main "${shared[@]}" --workdir="$workdir/run" &
learner=$!
worker first
running+=($!)
worker second
running+=($!)
running+=("$learner")

"$PY" launch/async_local.py kill "$workdir" first "$learner"
wait "${running[@]}"
"$PY" launch/async_local.py report "$workdir"
