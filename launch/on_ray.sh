#!/usr/bin/env bash
# Makes this host a member of the Ray cluster at RAY_ADDRESS, for an asynchronous run:
#
#   launch/on_ray.sh learner COMMAND...   # joins without CPUs or chips for workers, then runs COMMAND
#   launch/on_ray.sh worker               # joins with all that the host has, until Ray ends
#
# The learner's host that has the address RAY_ADDRESS starts the cluster. RAY_AUTH_TOKEN is the token
# of all members. Exits with 42, for a restart, when Ray does not start or has ended.
#
# Examples:
#   RAY_ADDRESS=10.0.0.2:6379 RAY_AUTH_TOKEN=... ./launch/on_ray.sh learner python -m jaxrl_tis.main ...
#   RAY_ADDRESS=10.0.0.2:6379 RAY_AUTH_TOKEN=... ./launch/on_ray.sh worker
set -euo pipefail
# shellcheck source=launch/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
restart=42 patience=600  # exit code; seconds to wait for the head
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0

is_member() {  # whether Ray runs on this host, and reaches the head
  pgrep -x raylet && ray health-check --address="$RAY_ADDRESS"
} >/dev/null 2>&1

join() {  # $@: what the host offers to workers
  ray stop --force
  if [[ " $(hostname -I) " == *" ${RAY_ADDRESS%:*} "* ]]; then
    ray start --head --node-ip-address="${RAY_ADDRESS%:*}" --port="${RAY_ADDRESS##*:}" \
      --include-dashboard=false "$@"
  else
    until ray health-check --address="$RAY_ADDRESS" >/dev/null 2>&1 || [ "$SECONDS" -ge "$patience" ]; do
      sleep 5
    done
    ray start --address="$RAY_ADDRESS" "$@"
  fi
}

case ${1:-} in
  learner)
    shift
    # The cluster outlives a restart of the learner.
    is_member || join --num-cpus=0 '--resources={"TPU": 0}' || exit "$restart"
    exec "$@"
    ;;
  worker)
    join || exit "$restart"
    while pgrep -x raylet >/dev/null; do
      sleep 5
    done
    exit "$restart"
    ;;
  *)
    sed -n '2,9p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
