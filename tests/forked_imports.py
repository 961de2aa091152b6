"""What the server of forked processes imports, see forked.py."""

import gc

import matplotlib.figure  # noqa: F401  (for the forks)
from jax._src import cache_key

from jaxrl_tis import train  # noqa: F401

# On a CPU the key of the compilation cache holds the number of the process, and process 0 alone
# writes: the others would find nothing there.
cache_key._hash_accelerator_config = cache_key._hash_devices
gc.freeze()
gc.set_threshold(100_000, 20, 20)
