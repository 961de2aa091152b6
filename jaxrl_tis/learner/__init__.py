"""One update: from a rollout batch to new weights."""
