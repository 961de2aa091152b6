#!/usr/bin/env bash
# Controls the run on one host of a TPU VM, in the clone of this repository:
#
#   launch/on_vm.sh setup                # makes a virtual environment with all packages of a run
#   launch/on_vm.sh start CHIP ARGS...   # python -m jaxrl_tis.main ARGS under supervise.py, detached
#   launch/on_vm.sh work CHIP            # on a worker machine: Ray alone, in its stead
#   launch/on_vm.sh engine NAME MODEL ARGS...   # on a worker machine: vLLM, in its stead
#   launch/on_vm.sh follow               # shows the log to the end; exits with the run's exit code
#   launch/on_vm.sh status | stop        # prints the state; asks the run to save and to end
#
# Secrets (HF_TOKEN, ...) are read from ~/.jaxrl_tis_env, which launch/tpu_vm.py puts there. With
# RAY_ADDRESS among them, the run starts Ray on this host and stops it at its end. With ENGINES among
# them, it waits for these engines, and mounts the share WEIGHTS_MOUNT.
#
# Examples:
#   ./launch/on_vm.sh setup
#   ./launch/on_vm.sh status
set -euo pipefail
# shellcheck source=launch/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
extras=tpu,hub,gcs,tasks,math,wandb,ray,engines
state=$root/run.json arguments=$root/run.args log=$root/run.log supervisor=$root/run.pid

newer_python() {  # prints an interpreter of at least 3.11; images come with 3.10
  local name
  for name in python3.13 python3.12 python3.11; do
    command -v "$name" && return
  done
  python3 -m pip install --quiet --user uv >&2
  python3 -m uv python install --quiet 3.12 >&2
  python3 -m uv python find 3.12
}

secrets() {
  if [ -r "$HOME/.jaxrl_tis_env" ]; then
    set -a
    # shellcheck source=/dev/null
    source "$HOME/.jaxrl_tis_env"
    set +a
  fi
}

is_running() {  # once the machine was started anew, its process may be anything
  [ -r "$supervisor" ] &&
    grep -qsaE 'supervise\.py|on_vm\.sh' "/proc/$(cat "$supervisor")/cmdline"
}

prepare() {  # $1: kind of chip
  PYTHON=$(newer_python)
  prepare_venv "$extras"
  secrets
  LIBTPU_INIT_ARGS=$("$PY" -m jaxrl_tis.libtpu_flags "$1")
  export LIBTPU_INIT_ARGS PATH="$root/$venv/bin:$PATH"
}

mount_weights() {  # learner and engines see the share at the same path
  if ! mountpoint -q /mnt/weights; then
    command -v mount.nfs >/dev/null || sudo apt-get install --quiet --yes nfs-common
    sudo mkdir -p /mnt/weights
    # A folder is looked up anew where it was missing before.
    sudo mount -t nfs -o lookupcache=positive "$WEIGHTS_MOUNT" /mnt/weights
  fi
  sudo install -d -m 1777 "$WEIGHTS_FOLDER"
}

detach() {  # $@: options and command of supervise.py
  rm -f "$state"
  nohup setsid "$PY" launch/supervise.py --state="$state" "$@" >>"$log" 2>&1 </dev/null &
  echo $! >"$supervisor"
  echo "started; its log is $log"
}

case ${1:-} in
  setup)
    PYTHON=$(newer_python)
    prepare_venv "$extras"
    ;;
  start)
    chip=$2
    shift 2
    if is_running; then
      echo "already running here: process $(cat "$supervisor")"
      exit
    fi
    prepare "$chip"
    command=("$PY" -m jaxrl_tis.main "$@")
    if [ -n "${RAY_ADDRESS:-}" ]; then
      detach --after="ray stop" -- bash launch/on_ray.sh learner "${command[@]}"
    elif [ -n "${ENGINES:-}" ]; then
      mount_weights
      detach -- bash launch/on_engines.sh learner "${command[@]}"
    else
      detach -- "${command[@]}"
    fi
    "$PY" -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@" >"$arguments"
    ;;
  work)
    if is_running; then  # with an older address of the head
      kill -TERM "$(cat "$supervisor")"
      tail --pid="$(cat "$supervisor")" -f /dev/null
    fi
    prepare "$2"
    detach --after="ray stop" -- bash launch/on_ray.sh worker
    rm -f "$arguments"
    ;;
  engine)
    if is_running; then
      echo "already running here: process $(cat "$supervisor")"
      exit
    fi
    PYTHON=$(newer_python)
    prepare_venv "$extras"
    secrets
    mount_weights
    [ -x .venv-vllm/bin/vllm ] || bash launch/vllm.sh install .venv-vllm tpu
    detach -- bash launch/on_engines.sh serve "$2" vllm .venv-vllm "${@:3}"
    rm -f "$arguments"
    ;;
  follow)
    tail -n +1 -F --pid="$(cat "$supervisor")" "$log" 2>/dev/null
    code=$(sed -n 's/.*"code": \([0-9]*\).*/\1/p' "$state")
    exit "${code:-1}"
    ;;
  status)
    if is_running; then said="running"; else said="not running"; fi
    said+=": $(cat "$state" 2>/dev/null || echo "no run.json") on $HOSTNAME"
    if [ -r "$arguments" ]; then said+=" with $(cat "$arguments")"; fi
    echo "$said"
    ;;
  stop)
    if is_running; then
      kill -TERM "$(cat "$supervisor")"
      echo "process $(cat "$supervisor") was asked to save and to end"
    else
      echo "nothing runs here"
    fi
    ;;
  *)
    sed -n '2,9p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
