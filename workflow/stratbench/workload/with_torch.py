"""Imports PyTorch and the parts of it that every training needs, without garbage collection."""

from __future__ import annotations

import gc

# The import creates a million objects, which the garbage collector would check again and again. It is
# disabled during the import, and ignores these objects later (`freeze`).
gc.disable()
try:
    from stratbench.workload.torch_internals import import_compiler

    # Without this call, creating the first optimizer would import these modules in each process.
    import_compiler()
finally:
    gc.freeze()
    gc.enable()
