#!/usr/bin/env bash
# Checks the sources from a bare clone, without running them: ./launch/lint.sh [arguments of ruff]
# ruff.toml has the rules. --fix mends what ruff can mend.
#
# Examples:
#   ./launch/lint.sh
#   ./launch/lint.sh --fix
set -euo pipefail
# shellcheck source=launch/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
prepare_venv lint
"$PY" -m ruff check "$@"
