"""Runs: where they are on the disk, what they were set to, and how they compare."""
