"""Inference engines of others as the sampler, over HTTP."""
