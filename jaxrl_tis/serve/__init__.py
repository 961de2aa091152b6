"""The command that serves a checkpoint; docs/server.md."""
