"""Reinforcement learning of language models with the sampler/learner gap measured and corrected."""
