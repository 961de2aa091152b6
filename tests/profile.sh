#!/usr/bin/env bash
# Where the tests' time goes: ./tests/profile.sh [pytest arguments]
# Prints the slowest tests and, by test file, seconds, programs compiled, and seconds of tracing,
# lowering and compiling. The compile cache starts empty, as in a fresh clone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export JAX_COMPILATION_CACHE_DIR=$work/cache COMPILE_LOG=$work/log.jsonl PYTHONPATH=.
./launch/test.sh -p tests.compile_log --durations=40 "$@" || echo "some tests failed"
pythons=(.venv-*/bin/python)
"${pythons[0]}" -m tests.compile_log "$work/log.jsonl"
