#!/usr/bin/env bash
# The hosts of a run with engines of others. WEIGHTS_FOLDER is the folder that all of them see:
#
#   launch/on_engines.sh learner COMMAND...   # waits for ENGINES (names with commas), runs COMMAND
#   launch/on_engines.sh serve NAME KIND VENV MODEL [ARGS...]  # an engine; KIND: vllm or sglang
#   launch/on_engines.sh start NAME KIND VENV MODEL [ARGS...]  # the same, detached
#   launch/on_engines.sh status | stop        # of the engine that was started
#
# An engine writes its address to .engine-NAME in the folder. The learner reads it there: both see one
# folder. Then it waits until the engine is healthy. Exits with 42, for a restart, after an hour.
#
# Examples:
#   ENGINES=a,b WEIGHTS_FOLDER=/mnt/weights/x ./launch/on_engines.sh learner python -m jaxrl_tis.main ...
#   WEIGHTS_FOLDER=/mnt/weights/x ./launch/on_engines.sh start 10.0.0.7 sglang /opt/sglang OWNER/NAME
set -euo pipefail
# shellcheck source=launch/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
restart=42 patience=${PATIENCE:-3600} port=${ENGINE_PORT:-8000}
log=$root/engine.log pid=$root/engine.pid

refuse() {
  echo "$1" >&2
  exit 2
}

name_engine() {  # $1: name; tells this host the address, which changes with the machine
  local address
  address=$(cat "$WEIGHTS_FOLDER/.engine-$1" 2>/dev/null) || return 1
  if [ "$address" != "$1" ] && [ "$(getent hosts "$1" | awk '{ print $1 }')" != "$address" ]; then
    sudo sed -i -e "/ $1\$/d" -e "\$a $address $1" /etc/hosts
  fi
}

is_healthy() {
  curl --silent --fail --max-time 5 --noproxy '*' --output /dev/null "http://$1:$port/health"
}

is_running() {
  [ -r "$pid" ] && grep -qsaE 'vllm|sglang|on_engines\.sh' "/proc/$(cat "$pid")/cmdline"
}

learner() {
  local name names
  IFS=, read -ra names <<<"$ENGINES"
  for name in "${names[@]}"; do
    until name_engine "$name" && is_healthy "$name"; do
      if [ "$SECONDS" -ge "$patience" ]; then
        if [ -e "$WEIGHTS_FOLDER/.engine-$name" ]; then
          echo "http://$name:$port/health does not answer; see the log of that engine" >&2
        else
          echo "there is no $WEIGHTS_FOLDER/.engine-$name: the engine was not started, or sees another" \
            "folder there; mount the same share on both" >&2
        fi
        exit "$restart"
      fi
      sleep 2
    done
    echo "http://$name:$port is healthy, and sees $WEIGHTS_FOLDER"
  done
  (  # a machine that replaces another one has another address
    while sleep 30 && kill -0 $$ 2>/dev/null; do
      for name in "${names[@]}"; do name_engine "$name" || true; done
    done
  ) &
  exec "$@"
}

serve() {
  local name=$1 kind=$2 folder=$3 model=$4 address
  shift 4
  mkdir -p "$WEIGHTS_FOLDER" && [ -w "$WEIGHTS_FOLDER" ] ||
    refuse "$WEIGHTS_FOLDER cannot be written here; mount the share of --weights_mount"
  read -r address _ < <(hostname -I)
  echo "${ENGINE_ADDRESS:-$address}" >"$WEIGHTS_FOLDER/.engine-$name"
  case $kind in
    vllm) exec bash launch/vllm.sh serve "$folder" "$model" "$port" --host 0.0.0.0 "$@" ;;
    sglang)
      exec "$folder/bin/python" -m sglang.launch_server --model-path "$model" --host 0.0.0.0 \
        --port "$port" "$@"
      ;;
    *) refuse "the kind of engine $kind is unknown; give vllm or sglang" ;;
  esac
}

case ${1:-} in
  learner) learner "${@:2}" ;;
  serve) serve "${@:2}" ;;
  start)
    if is_running; then
      echo "already running here: process $(cat "$pid")"
      exit
    fi
    ENGINE_ADDRESS=$2 nohup setsid bash launch/on_engines.sh serve "${@:2}" >"$log" 2>&1 </dev/null &
    echo $! >"$pid"
    echo "started; its log is $log"
    ;;
  status)
    said="not running"
    if is_running; then said="running: process $(cat "$pid")"; fi
    echo "$said on $HOSTNAME"
    ;;
  stop)
    if is_running; then kill -TERM "$(cat "$pid")"; else echo "nothing runs here"; fi
    ;;
  *)
    sed -n '2,7p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
