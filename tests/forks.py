"""Runs the tiny config in forked processes, which need not import anything again.

    python tests/forks.py     reads a workdir per line; prints the number of the process that runs
                              it, and then how it ended
"""

import os
import sys
import traceback

import jax  # noqa: F401  (for the forks)

from tests import tiny

SETTINGS = dict(steps=3, eval__every=3, checkpoint__every=1, checkpoint__keep=2)


def child(workdir: str) -> None:
    code = 1
    try:
        tiny.run(workdir, **SETTINGS)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.dup2(2, 1)  # what a run prints must not look like an answer
            child(line.strip())
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
