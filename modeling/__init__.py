"""Model definitions: the BAGEL mixture of transformers, its autoencoder and its diffusion steps."""
