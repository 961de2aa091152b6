"""Who generates when: sources of the batches that a run trains on; docs/async.md explains them."""
