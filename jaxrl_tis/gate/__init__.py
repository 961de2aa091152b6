"""Measures the gap of sampler and learner at the same weights, and splits it into causes."""
