"""Programs that talk to the endpoint of a run: agents that are trained unchanged; docs/harness.md."""
