#!/usr/bin/env bash
# Checks names, arguments, None and overrides in jaxrl_tis, benchmarks, launch and configs with mypy, by the
# settings in mypy.ini. It installs mypy into the environment of launch/test.sh, which has the packages.
#   launch/types.sh [arguments of mypy]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
prepare_venv test
"$PY" -c "import mypy" 2>/dev/null ||
  "$PY" -m pip install --quiet --no-compile --disable-pip-version-check --editable ".[types]"
exec "$PY" -m mypy "$@"
