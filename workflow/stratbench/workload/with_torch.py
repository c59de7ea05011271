"""Imports PyTorch and what each training needs of it; to import this first is faster than `import torch`."""

from __future__ import annotations

import gc

# A million objects come to stay: looking for garbage among them would take 0.5 s of 2.5.
gc.disable()
try:
    # Every optimizer's constructor would import it, for 1.5 s of each process.
    import torch._dynamo  # noqa: F401
finally:
    gc.freeze()  # nor later
    gc.enable()
