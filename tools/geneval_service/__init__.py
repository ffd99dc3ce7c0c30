"""GenEval reward service: detection, colors and scoring behind HTTP."""
