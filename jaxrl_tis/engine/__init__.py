"""The rollout engine: programs, pages, scheduler and records; docs/engine.md explains it."""
