"""Settings of every test: one thread, so that sums come out in one order on any machine."""

import torch

torch.set_num_threads(1)
