"""Embedded reward service: a toy that judges colours only, without GPU, model or download."""
