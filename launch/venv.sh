# Sourced by the other scripts of this folder. Makes or reuses .venv-<python version> inside the clone and
# sets $PY to its interpreter. PYTHON names the interpreter that makes the environment.
# With --help as its first argument a script prints its head and ends.
# shellcheck shell=bash
case "${1:-}" in
  -h | --help)
    awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0"
    exit 0
    ;;
esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 1

prepare_venv() {  # $1: extras such as "test", or nothing; $2: end of the name of an own environment
  local python=${PYTHON:-python3} version stamp want start
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || exit 1
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "$python is Python $version; 3.11 or newer is needed (set PYTHON=/path/to/python3.12)" >&2
    exit 1
  fi
  venv=.venv-$version${2:-}
  PY=$root/$venv/bin/python
  stamp=$venv/.installed-${1:-core}
  want=$(cksum setup.py)
  if [ -x "$PY" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then
    echo "using $venv"
    return
  fi
  start=$SECONDS
  echo "making $venv with $python (Python $version) and installing the packages of setup.py${1:+ [$1]}"
  [ -x "$PY" ] || "$python" -m venv "$venv" || exit 1
  # What is never imported need not be compiled.
  "$PY" -m pip install --quiet --no-compile --disable-pip-version-check --editable ".${1:+[$1]}" || exit 1
  echo "$want" >"$stamp"
  echo "installed in $((SECONDS - start)) s"
}

export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$root/.cache/jax}
# Small programs, too, are kept: together they take as long to compile as a large one.
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=${JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS:-0}
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}
# XLA on CPU takes and returns large buffers all the time; huge pages spare their page faults.
export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}
