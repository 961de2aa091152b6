"""What a run writes: metrics, samples, checkpoints, provenance."""
