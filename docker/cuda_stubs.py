"""Makes empty CUDA libraries with which torch of PyPI loads on a machine without GPUs.

python cuda_stubs.py FOLDER    the libraries, at FOLDER/path/of/site-packages/nvidia/cu13/lib

PyPI's torch for Linux is linked to 3 GB of CUDA's libraries, and Python cannot import it without
them, although nothing calls them without a GPU. This program defines the functions that torch
needs: each says that it is missing and ends the process. The program needs gcc; the image's target
cpu-pypi runs it.
"""

import re
import subprocess
import sys
from pathlib import Path

# The library that `import torch` loads, and the path by which torch's libraries look for CUDA's.
LOADED = "torch/lib/libtorch_python.so"
SEARCHED = "nvidia/cu13/lib"
SOURCE = """
#include <stdio.h>
#include <stdlib.h>
void missing(void) {
    fputs("this image has no CUDA libraries: device=cuda needs fedhet:cuda\\n", stderr);
    abort();
}
"""


def main() -> None:
    """Make the libraries that the installed torch lacks."""
    (packages,) = Path("/opt/venv/lib").glob("python3.*/site-packages")
    said = ldd(packages / LOADED)
    libraries = sorted(set(re.findall(r"^\s*(\S+) => not found", said, re.MULTILINE)))
    symbols = sorted(set(re.findall(r"undefined symbol: (?!_?Py)(\w+)", said)))
    folder = Path(sys.argv[1]) / (packages / SEARCHED).relative_to("/")
    folder.mkdir(parents=True)
    aliases = [f'void {name}(void) __attribute__((alias("missing")));\n' for name in symbols]
    link(folder / "libcuda_stubs.so", SOURCE + "".join(aliases), "-w")
    for name in libraries:
        link(folder / name, "", "-Wl,--no-as-needed", f"-L{folder}", "-lcuda_stubs")
    print(f"{len(libraries)} libraries, {len(symbols)} symbols: {' '.join(libraries)}")


def ldd(library: Path) -> str:
    """Return what the loader says about a library, with all symbols resolved."""
    return subprocess.run(
        ["ldd", "-r", library], capture_output=True, text=True, check=False
    ).stdout


def link(path: Path, source: str, *options: str) -> None:
    """Compile a shared library, which finds the others of its folder."""
    words = ["gcc", "-shared", "-fPIC", "-O1", f"-Wl,-soname,{path.name}", "-Wl,-rpath,$ORIGIN"]
    command = [*words, "-x", "c", "-", "-o", str(path), *options]
    subprocess.run(command, input=source, text=True, check=True)


if __name__ == "__main__":
    main()
