"""Print the folder that holds cuda.h and nvrtc.h, as installed by nvidia-cuda-runtime and nvidia-cuda-nvrtc."""

import importlib.metadata
import sys
from pathlib import Path

NEEDED = {"nvidia-cuda-runtime": "cuda.h", "nvidia-cuda-nvrtc": "nvrtc.h"}


def folder_of(package: str, header: str) -> Path:
    """Return the folder of `header` inside an installed package, or stop the build naming what is missing."""
    for file in importlib.metadata.files(package) or []:
        if file.name == header:
            return Path(str(file.locate())).resolve().parent
    sys.exit(
        f"{header} is not in the installed package {package}; reinstall it: pip install --force-reinstall {package}"
    )


print(";".join(sorted({str(folder_of(package, header)) for package, header in NEEDED.items()})))
