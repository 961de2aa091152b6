#!/usr/bin/env bash
# Runs the tests from a bare clone: ./launch/test.sh [--quick | --changed[=REVISION] | --all] [pytest arguments]
# The default runs tests without the marker "all"; they detect every wrong number. --all runs every test.
# --changed runs those of the default that a change since REVISION can reach (HEAD: what is not committed),
# and all tests of the files that it touches.
# --quick runs files that compile few programs and inject no fault. A -m of your own replaces the choice.
#
# Examples:
#   ./launch/test.sh --quick
#   ./launch/test.sh --changed=main
set -euo pipefail
# shellcheck source=launch/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
prepare_venv test
chosen=(-m "not all")
case "${1:-}" in
  --all) chosen=() && shift ;;
  --changed) chosen=(--changed=HEAD) && shift ;;
  --changed=*) chosen=() ;;
  --quick) chosen=(-m "not all and not compiles and not faults" --files-under=16) && shift ;;
esac
# Hundreds of processes import jax: what Python compiles is kept, beside the programs of XLA.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=$root/.cache/python
# A file stays in one process, whose fixtures and programs its tests share.
exec "$PY" -m pytest -n "${TEST_PROCESSES:-2}" --dist loadfile --no-loadscope-reorder \
  "${chosen[@]}" "$@"
