"""Imports PyTorch with the parts that every training needs, faster than `import torch._dynamo` does."""

from __future__ import annotations

import gc

# The import makes a million objects, and they stay. Python would look for garbage among them, which
# takes 0.5 s of 2.5 s, so it looks for none now and, once they are frozen, not among them later.
gc.disable()
try:
    from stratbench.workload.torch_internals import import_compiler

    # Every optimizer's constructor would import this part, in 1.5 s of each process.
    import_compiler()
finally:
    gc.freeze()
    gc.enable()
