#!/usr/bin/env bash
# Runs the quickstart from a bare clone: ./launch/quickstart.sh [moe|tool|vllm] [--compare] [--config.field=value ...]
# With moe the model has experts (configs/quickstart_moe.py), with tool it learns to call a calculator
# (configs/quickstart_tool.py). --compare also runs the config's other variants with the same seed. One
# report overlays all four. With vllm the sampler is vLLM on this machine's CPUs (configs/quickstart_vllm.py);
# the first call installs it in .venv-vllm, 3 GB.
#
# Examples:
#   ./launch/quickstart.sh
#   ./launch/quickstart.sh moe --compare
set -euo pipefail
# shellcheck source=launch/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

vllm() {  # trains with vLLM as the sampler
  local engine=.venv-vllm start=runs/quickstart_vllm-start url=http://127.0.0.1:8300 server
  prepare_venv engines
  launch/vllm.sh install "$engine"
  if [ ! -e "$start/model" ]; then
    echo "running configs/quickstart_vllm.py:start in $start"
    "$PY" -m jaxrl_tis.main --config=configs/quickstart_vllm.py:start --workdir="$start"
    "$PY" -m jaxrl_tis.export "$start" "$start/model" --dtype=float32
  fi
  echo "starting vLLM at $url, with its log in $start/vllm.log"
  launch/vllm.sh serve "$engine" "$start/model" 8300 --max-model-len 64 >"$start/vllm.log" 2>&1 &
  server=$!
  # shellcheck disable=SC2064 # the number of now
  trap "kill $server 2>/dev/null || true" EXIT
  until curl --silent --fail --output /dev/null "$url/health"; do
    kill -0 "$server" 2>/dev/null || { tail -n 20 "$start/vllm.log" >&2 && exit 1; }
    sleep 1
  done
  kill -0 "$server"  # another server may have answered
  echo "running configs/quickstart_vllm.py in runs/quickstart_vllm"
  "$PY" -m jaxrl_tis.main --config=configs/quickstart_vllm.py --workdir=runs/quickstart_vllm "$@"
}

if [ "${1:-}" = vllm ]; then
  vllm "${@:2}"
  exit
fi
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
