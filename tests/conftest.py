"""Makes every run of the tests the same run: one torch thread, the same hypothesis examples, no clock in them."""

import importlib.util

from hypothesis import settings

settings.register_profile("eyas", derandomize=True, deadline=None)
settings.load_profile("eyas")

if importlib.util.find_spec("torch"):
    import torch

    torch.set_num_threads(1)
