"""Steps of the stochastic flow sampler."""
