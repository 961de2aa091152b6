"""Episodes of several turns: environments, their processes, and the token ids between two answers."""
