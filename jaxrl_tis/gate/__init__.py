"""Measures how far the sampler is from the learner at the same weights, and from which cause."""
