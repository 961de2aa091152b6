"""The files that a run writes: metrics, samples, checkpoints, provenance."""
