"""Ids of a vocabulary in the part of one device."""

from unittest import mock

import jax.numpy as jnp

from jaxrl_tis.engine.shards import WHOLE, Shards


def test_ids_of_other_parts_are_beyond_the_last():
    """The second of two parts of four ids has 4 to 7."""
    with mock.patch.object(Shards, "index", 1):
        second = Shards("tensor", 2)
        assert second.ids(4).tolist() == [[4, 5, 6, 7]]
        assert second.local(jnp.array([0, 3, 4, 7, 8]), 4).tolist() == [4, 4, 0, 3, 4]
    assert WHOLE.local(jnp.array([0, 3]), 4).tolist() == [0, 3]
