"""Draws one static page from the records of runs."""
