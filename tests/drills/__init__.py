"""Runs that are killed, paused, stopped and shrunk, on purpose and at random. Most are slow."""
