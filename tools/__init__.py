"""Command-line tools around the trainer."""
