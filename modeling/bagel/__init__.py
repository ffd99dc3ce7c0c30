"""BAGEL: one model definition for rollout and learner."""
