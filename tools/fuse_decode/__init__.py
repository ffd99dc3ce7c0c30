"""Operator checks of the fused text decode: `python -m tools.fuse_decode`."""
