"""A small completions server to look at a checkpoint; docs/server.md has its routes."""
