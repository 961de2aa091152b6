"""OpenAI-style HTTP routes of an engine: requests parsed, answers written; docs/server.md has them."""
