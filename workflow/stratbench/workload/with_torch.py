"""Imports PyTorch with the parts that every training needs, faster than `import torch._dynamo` does."""

from __future__ import annotations

import gc

# The import creates a million permanent objects. The garbage collector would check them for 0.5 s of the 2.5
# s. It is disabled during the import, and later ignores the objects because they are frozen.
gc.disable()
try:
    from stratbench.workload.torch_internals import import_compiler

    # Without this, every optimizer's constructor would import these modules, in 1.5 s per process.
    import_compiler()
finally:
    gc.freeze()
    gc.enable()
