"""What a process of several gets from each function of jaxrl_tis.runtime.processes, as JSON on stdout."""

import json
import threading
import time

import jax
import numpy as np
from absl import app

from jaxrl_tis.runtime import cli, processes

CONNECTED = processes.define_flags()


def refused(f):
    """(kind, message) of what processes.first raises."""
    try:
        processes.first(f)
    except Exception as error:
        return [type(error).__name__, str(error)]


def refuse():
    return cli.check_folder("json", "/none/x")


def interrupt():
    raise cli.Interrupted("the head is lost")


def met():
    """When this process went to meet the other, which is late, and when it came from there."""
    if processes.index() == 0:
        time.sleep(1)
    start = time.time()
    thread = threading.Thread(target=processes.meet, args=("somewhere", 60))
    thread.start()
    thread.join()
    return start, time.time()


def calls():
    me = processes.index()
    done = []
    shared = processes.share(list(range(5)), lambda items: done.extend(items) or
                             [[x, me] for x in items])
    return {
        "index": me,
        "first": processes.is_first(),
        "alone": processes.is_alone(),
        "exchange": processes.exchange({"me": me, "long": "é" * (me * 3000), "x": 0.1 + me}),
        "gather": processes.gather(["a", "b"] if me == 0 else []),
        "share": shared,
        "did": done,
        "shard": processes.shard(),
        "any": [processes.any_of(False), processes.any_of(me == 1)],
        "told": processes.first(lambda: {"by": me}),
        "refused": refused(refuse),
        "interrupted": refused(interrupt),
        "same": processes.difference({"a": np.arange(3), "b": {"x": [1, None]}}),
        "other dtype": processes.difference({"a": np.zeros(2, np.int32 if me else np.float32)}),
        "other value": processes.difference({"a": 1, "config.seed": me, "c": me}),
        "of the second alone": processes.difference({"a": 1} | ({"b": 2} if me else {})),
        "missing": processes.difference({"a": 1} | ({"b": 2} if me == 0 else {})),
    }


def main(_):
    with CONNECTED():
        found = calls()
        found["met"] = met()
        with open(f"{FOLDER.value}/found{jax.process_index()}.json", "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    from absl import flags

    FOLDER = flags.DEFINE_string("folder", None, "")
    app.run(main)
