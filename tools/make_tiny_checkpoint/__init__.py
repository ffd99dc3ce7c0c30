"""Maker of a tiny BAGEL checkpoint that thinks in well-formed text and draws flat pictures."""
