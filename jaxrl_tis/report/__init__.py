"""Draws one static HTML page from the records of runs."""
