"""A small server of completions, to look at a checkpoint; docs/engine.md has its routes."""
