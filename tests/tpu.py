"""Devices of a TPU topology that is not there: programs compile for them, none can run."""
import functools
import os
import pytest
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
@functools.cache
def devices(topology: str) -> list:
    pytest.importorskip("libtpu")
    from jax.experimental import topologies
    return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
