# Sourced by the other scripts of this folder: the interpreters of the lanes, with what tests need.
# Sets $older to Python 3.11, and $newer to 3.12 or 3.13, empty if there is none. `prepare_older` sets
# $older_venv to the environment of $older.
# shellcheck shell=bash
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

is_python() { "$1" -c 'import sys; sys.exit(not sys.argv[1] <= "%d.%d" % sys.version_info[:2])' "$2" 2>/dev/null; }

find_newer() {
  local python
  for python in python3.13 python3.12 "$HOME"/.pyenv/versions/3.13.*/bin/python3 \
    "$HOME"/.pyenv/versions/3.12.*/bin/python3; do
    if command -v "$python" >/dev/null && is_python "$python" 3.12; then
      echo "$python"
      return
    fi
  done
}

prepare() { (export PYTHON=$1; source launch/venv.sh; prepare_venv test); }  # interpreter

install_verifiers() {  # whose `openai` is older than that of the tests
  [ -x .venv-verifiers/bin/pip ] || "$older" -m venv .venv-verifiers
  .venv-verifiers/bin/pip install --quiet --no-compile --disable-pip-version-check 'verifiers>=0.4,<0.5'
}

prepare_older() {
  install_verifiers &
  local verifiers=$!
  prepare "$older" || return
  # shellcheck disable=SC2034  # the scripts that source this read it
  older_venv=$("$older" -c 'import sys; print(".venv-%d.%d" % sys.version_info[:2])')
  if wait "$verifiers"; then
    export VERIFIERS_PYTHON=$PWD/.venv-verifiers/bin/python
  else
    echo "== verifiers could not be installed: its tests are skipped"
  fi
}

lane() {  # what it is, interpreter, arguments of launch/test.sh
  local name=$1 python=$2 status=0
  shift 2
  echo "== lane: $("$python" --version), $name"
  PYTHON=$python ./launch/test.sh "$@" || status=$?
  [ "$status" = 5 ] || return "$status"  # a slice may have no tests
}

# shellcheck disable=SC2034  # the scripts that source this read both
older=$(command -v python3.11 || command -v python3)
# shellcheck disable=SC2034
newer=$(find_newer)
