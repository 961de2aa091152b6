#!/usr/bin/env bash
# Runs the tests from a bare clone: ./launch/test.sh [pytest arguments]
set -euo pipefail
# shellcheck source=launch/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
prepare_venv test
# A file stays in one process, whose fixtures and programs its tests share; the slowest come first.
exec "$PY" -m pytest -n "${TEST_PROCESSES:-2}" --dist loadfile --no-loadscope-reorder "$@"
