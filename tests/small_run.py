"""The tiny run as a config file, for commands: --config=tests/small_run.py, or :cut for a mesh of
eight devices, whose gradients are sums over all of them."""

from tests import tiny


def get_config(mesh: str = ""):
    c = tiny.config().copy_and_resolve_references()
    c.unlock()
    c.steps = 3
    c.warmup.steps = 2
    c.eval.every = 1
    c.checkpoint.every = 1
    c.processes.consistency_every = 1
    if mesh == "cut":
        c.mesh.train, c.mesh.serve = (1, 8, 1), (8, 1, 1)
        c.train.microbatch_rows = 8
        c.rollout.prompts = 8
        c.engine.slots = 16
        c.engine.prefill_batch = 8
    return c
