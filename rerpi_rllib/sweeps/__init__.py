"""Sweeps: many runs that differ in a few settings, as one Ray Tune experiment."""
