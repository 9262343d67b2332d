"""Experiments on this machine: launch, run, collect, compare."""
