#!/usr/bin/env bash
# Runs the tests from a bare clone: ./launch/test.sh [--quick] [pytest arguments]
# --quick leaves out those that compile large programs or inject faults.
set -euo pipefail
# shellcheck source=launch/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
prepare_venv test
chosen=()
if [ "${1:-}" = --quick ]; then
  chosen=(-m "not compiles and not faults")
  shift
fi
# A file stays in one process, whose fixtures and programs its tests share.
exec "$PY" -m pytest -n "${TEST_PROCESSES:-2}" --dist loadfile --no-loadscope-reorder \
  "${chosen[@]}" "$@"
