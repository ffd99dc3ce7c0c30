"""GenEval prompts: reading, validation and generation."""
