#!/usr/bin/env bash
# Runs the tests from a bare clone: ./launch/test.sh [--all | --quick] [pytest arguments]
# By default those without the marker "all", which notice every wrong number. --all runs every test,
# --quick those of cheap files that compile no large program and inject no fault. An own -m replaces
# the choice.
#
# Examples:
#   ./launch/test.sh --quick
#   ./launch/test.sh tests/estimators
set -euo pipefail
# shellcheck source=launch/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
prepare_venv test
chosen=(-m "not all")
case "${1:-}" in
  --all) chosen=() && shift ;;
  --quick) chosen=(-m "not all and not compiles and not faults" --files-under=4) && shift ;;
esac
# A file stays in one process, whose fixtures and programs its tests share.
exec "$PY" -m pytest -n "${TEST_PROCESSES:-2}" --dist loadfile --no-loadscope-reorder \
  "${chosen[@]}" "$@"
