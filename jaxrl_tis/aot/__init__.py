"""Compiles the programs of a config for a TPU, without a TPU, and reports memory and FLOPs."""
