#!/usr/bin/env bash
# Checks names, arguments and None with mypy, by mypy.ini: ./launch/types.sh [arguments of mypy]
# mypy goes into the environment of launch/test.sh, whose packages it reads.
#
# Examples:
#   ./launch/types.sh
#   ./launch/types.sh jaxrl_tis/estimators
set -euo pipefail
# shellcheck source=launch/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
prepare_venv test
"$PY" -c "import mypy" 2>/dev/null ||
  "$PY" -m pip install --quiet --no-compile --disable-pip-version-check --editable ".[types]"
"$PY" -m mypy "$@"
