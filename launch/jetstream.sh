#!/usr/bin/env bash
# Tests the engine behind the interface of JetStream: ./launch/jetstream.sh [pytest arguments]
# google-jetstream 0.2.2 depends on TensorFlow and needs an environment of its own (3 GB).
#
# Examples:
#   ./launch/jetstream.sh
#   ./launch/jetstream.sh -x -v
set -euo pipefail
# shellcheck source=launch/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
prepare_venv jetstream -jetstream
export TF_CPP_MIN_LOG_LEVEL=3
"$PY" -c 'import jetstream.engine.engine_api' 2>/dev/null || {
  echo "google-jetstream cannot be imported; without it the test would skip itself" >&2
  exit 1
}
exec "$PY" -m pytest -p no:cacheprovider tests/engine/jetstream_test.py "$@"
