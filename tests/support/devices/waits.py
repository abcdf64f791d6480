"""Waits for the GPU, as torch notes them."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

NOTICE = "Synchronization debug mode is a prototype feature"  # of the first call in a process; no wait for the device
WAIT = "called a synchronizing CUDA operation"


@contextmanager
def waits_noted(mode: str) -> Iterator[None]:
    """Inside the context torch warns of each wait for the GPU, or raises.

    mode: as `torch.cuda.set_sync_debug_mode` has it.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=NOTICE)
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def recorded_waits() -> Iterator[list[str]]:
    """What torch said of waits inside the context, once it has ended; compilers warn of other things."""
    found = list[str]()
    with waits_noted("warn"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [text for each in caught if (text := str(each.message)).startswith(WAIT)]
