"""Tasks, rewards, tokenizers and the order in which prompts are read.

Nothing is imported here: the reward process must start without JAX.
"""
