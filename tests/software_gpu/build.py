"""Builds the software GPU's libraries for an environment's CUDA build of PyTorch, and puts them in place.

    python tests/software_gpu/build.py VENV [--restore]

The libraries go to VENV/software-gpu. In VENV's nvidia folders each library that there is one for becomes a
link to it; the real file is kept beside it as NAME.real, and --restore puts it back. PyTorch is not changed.
A second call builds nothing unless a source or PyTorch has changed. Needs g++ and nm.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "libraries"
#: Below the environment. stratbench knows by it (`cell/software_gpu.py`) that no GPU here is a real one.
FOLDER = "software-gpu"
STAMP = ".built-from"


@dataclass(frozen=True)
class Library:
    """A library: the file of its functions; others of `prefixes` that PyTorch imports become stubs."""

    soname: str
    source: str
    prefixes: str
    versioned: bool = False
    define: str = ""
    #: Functions that PyTorch looks up by name.
    by_name: str = ""


LIBRARIES = (
    Library("libcudart.so.13", "cuda_runtime.cpp", r"cuda[A-Z]|__cuda", True),
    Library("libcublas.so.13", "other.cpp", r"cublas(?!Lt)", True, "CUBLAS"),
    Library("libcublasLt.so.13", "other.cpp", r"cublasLt", True, "CUBLASLT"),
    Library("libcudnn.so.9", "cudnn.cpp", r"cudnn", True),
    Library("libcupti.so.13", "other.cpp", r"cupti", True, "CUPTI"),
    Library("libnccl.so.2", "nccl.cpp", r"nccl"),
    Library(
        "libcuda.so.1",
        "other.cpp",
        r"cu(?!File|da|blas|dnn|fft|rand|sparse|solver|pti)[A-Z]",
        define="CUDA",
        by_name="cuMemRelease cuMemMap cuMemAddressFree cuMemSetAccess cuMemUnmap "
        "cuMemGetAllocationGranularity cuMemExportToShareableHandle cuMemsetD32Async "
        "cuStreamWriteValue32 cuMulticastAddDevice cuMulticastBindMem cuMulticastUnbind "
        "cuMemImportFromShareableHandle cuMemRetainAllocationHandle cuMemGetAddressRange_v2 cuInit "
        "cuStreamWaitValue32",
    ),
    Library("libnvidia-ml.so.1", "nvml.cpp", r"nvml"),
)
STUBS_HEAD = """\
#include <stdio.h>
#include <stdlib.h>
static int say(const char *name) {
  const char *t = getenv("SOFTWARE_GPU_TRACE");
  if (t && *t == '1') fprintf(stderr, "software GPU: stub %s\\n", name);
  return 0;
}
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("venv", type=Path)
    parser.add_argument("--restore", action="store_true", help="put NVIDIA's libraries back")
    args = parser.parse_args()
    site = next((args.venv / "lib").glob("python3*/site-packages")).resolve()
    out = (args.venv / FOLDER).resolve()
    if args.restore:
        restore(site, out)
        return 0
    made_from = digest(site)
    stamp = out / STAMP
    linked = all(p.is_symlink() for library in LIBRARIES for p in places(library, site))
    if linked and stamp.is_file() and stamp.read_text(encoding="utf-8") == made_from:
        return 0
    if fault := fault_of(args.venv):
        sys.exit(fault)
    out.mkdir(exist_ok=True)
    stamp.unlink(missing_ok=True)
    imported = imports(site)
    for library in LIBRARIES:
        build(library, imported, site, out)
        put(library, site, out)
    stamp.write_text(made_from, encoding="utf-8")
    return 0


def fault_of(venv: Path) -> str | None:
    """Why nothing can be built for this environment, in a sentence; None if all is well."""
    for tool, package in (("g++", "g++"), ("gcc", "gcc"), ("nm", "binutils")):
        if shutil.which(tool) is None:
            return (
                f"the software GPU is compiled, and {tool} is not there: install your system's {package} "
                "package"
            )
    ask = "import torch; print(torch.version.cuda or '', torch.__version__)"
    told = subprocess.run(
        [venv / "bin" / "python", "-c", ask], capture_output=True, text=True, check=False
    )
    if told.returncode:
        return f"PyTorch of {venv} cannot be imported: {told.stderr.strip().splitlines()[-1]}"
    cuda, version = told.stdout.rstrip("\n").split(" ")
    if not cuda.startswith("13."):
        of = f"for CUDA {cuda}" if cuda else "for the CPU"
        return (
            f"the software GPU needs PyTorch's build for CUDA 13, and {venv} has {version}, which is {of}: "
            f"remove {venv}, and let pip find PyPI's own wheel of PyTorch"
        )
    return None


def digest(site: Path) -> str:
    """What the libraries are made from: these sources and PyTorch's libraries, by size and time."""
    of = hashlib.sha256()
    for path in sorted([Path(__file__), *SOURCES.rglob("*")]):
        if path.is_file():
            of.update(path.read_bytes())
    for path in sorted(site.glob("torch/lib/*.so")):
        of.update(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}\n".encode())
    return of.hexdigest()


def imports(site: Path) -> set[str]:
    """The functions that PyTorch's and torchvision's libraries leave to others."""
    names: set[str] = set()
    for path in [*site.glob("torch/lib/*.so"), *site.glob("torchvision/*.so")]:
        listed = symbols("-D", "--undefined-only", path)
        names |= {name.split("@")[0] for name in listed}
    return names


def symbols(*arguments: object) -> set[str]:
    """The names that nm prints."""
    command = ["nm", *map(str, arguments)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {line.split()[-1] for line in text.splitlines()}


def build(library: Library, imported: set[str], site: Path, out: Path) -> None:
    """Compile a library; what PyTorch imports of it and nobody wrote becomes a stub that returns 0."""
    headers = [SOURCES / "headers", *sorted(site.glob("nvidia/*/include"))]
    flags = ["-std=c++17", "-O2", "-fPIC", "-w", *(f"-I{folder}" for folder in headers)]
    if library.define:
        flags.append(f"-D{library.define}")
    made, stubs, script = (out / f"{library.soname}{end}" for end in (".o", ".stubs.c", ".map"))
    run("g++", *flags, "-c", SOURCES / library.source, "-o", made)
    wanted = {name for name in imported if re.match(library.prefixes, name)}
    missing = sorted((wanted | set(library.by_name.split())) - symbols("--defined-only", made))
    body = 'int {0}() {{ static int told; if (!told++) say("{0}"); return 0; }}\n'
    stubs.write_text(STUBS_HEAD + "".join(map(body.format, missing)), encoding="utf-8")
    link = ["g++", "-shared", "-fPIC", f"-Wl,-soname,{library.soname}"]
    if library.versioned:  # PyTorch asks for functions of this version
        script.write_text(f"{library.soname} {{ global: *; }};\n", encoding="utf-8")
        link.append(f"-Wl,--version-script={script}")
    run("gcc", "-O1", "-fPIC", "-c", stubs, "-o", stubs.with_suffix(".o"))
    new = out / f"{library.soname}.new"
    run(*link, made, stubs.with_suffix(".o"), "-o", new, "-ldl", "-lpthread")
    new.replace(out / library.soname)
    for path in (made, stubs, stubs.with_suffix(".o"), script):
        path.unlink(missing_ok=True)


def places(library: Library, site: Path) -> list[Path]:
    """Where the environment has the library; the driver's, which it has not, beside the others."""
    found = sorted(site.glob(f"nvidia/*/lib/{library.soname}"))
    return found or [site / "nvidia/cu13/lib" / library.soname]


def put(library: Library, site: Path, out: Path) -> None:
    """Make the environment's library a link to the one that was built; the real one is kept."""
    for place in places(library, site):
        if place.exists() and not place.is_symlink():
            place.replace(place.with_name(f"{place.name}.real"))
        place.unlink(missing_ok=True)
        place.symlink_to(out / library.soname)


def restore(site: Path, out: Path) -> None:
    """Put NVIDIA's libraries back."""
    for link in (path for path in site.glob("nvidia/*/lib/*") if path.is_symlink()):
        if link.readlink().parent == out:
            link.unlink()
    for kept in site.glob("nvidia/*/lib/*.real"):
        kept.replace(kept.with_suffix(""))
    shutil.rmtree(out, ignore_errors=True)


def run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True)


if __name__ == "__main__":
    sys.exit(main())
