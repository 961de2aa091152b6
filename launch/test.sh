#!/usr/bin/env bash
# Runs the tests from a bare clone: ./launch/test.sh [pytest arguments]
set -euo pipefail
# shellcheck source=launch/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
prepare_venv test
exec "$PY" -m pytest -n "${TEST_PROCESSES:-2}" "$@"
