"""Replays a recorded run of the reference trainer with this one and compares number by number."""
