"""Online-RL trainer: rollout, rewards, packing, losses, optimisation."""
