"""Experiments on the estimators: exact gradients, bias and variance on small policies."""
