"""A small server of completions, to look at a checkpoint; docs/server.md has its routes."""
