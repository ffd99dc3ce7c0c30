"""Operator checks of the fused image flow: `python -m tools.fuse_flow`."""
