"""Rollout sources: synchronous and asynchronous generation of training batches; see
docs/async.md."""
