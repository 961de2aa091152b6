"""Episodes of several turns: environments, their processes, and the ids between two answers."""
