"""Compiles the programs of a config for a TPU that is not there, and says what they hold and do."""
