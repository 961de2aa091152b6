"""What the log-probs of any trainer say: gaps, their causes, and what every correction would do to them."""
