"""How a process starts, listens, locks and stops, and where its files are. Knows nothing of the rest."""
