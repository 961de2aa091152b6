"""Reads the record of a run and names the cause of its off-policy drift."""
