"""What members of crews would import each for itself: imported once, by the server that forks them. torch imports much, which takes
seconds, when its first optimizer is made, and when the first module is wrapped."""

import sharded_jobs
import torch
import torch.nn.parallel.distributed

torch.optim.SGD([torch.zeros(1)], lr=0.1)
assert sharded_jobs is not None
