#!/usr/bin/env bash
# Checks the sources from a bare clone, without running them: ./launch/lint.sh [arguments of ruff]
# First ruff by the rules of ruff.toml, --fix mends what it can mend; then mypy by mypy.ini.
#
# Examples:
#   ./launch/lint.sh
#   ./launch/lint.sh --fix
set -euo pipefail
# shellcheck source=launch/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
prepare_venv test,lint
"$PY" -m ruff check "$@"
exec "$PY" -m mypy
