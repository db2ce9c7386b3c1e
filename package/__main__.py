"""``python -m ringfp4 [DIR ...]``: what is installed, what it serves here, and why not if not.

Looks at the driver, the devices and the artefact folders (the package's own and those named), and
verifies every cubin against its manifest. Exit status 1 if a folder is damaged, else 0.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import ringfp4
import torch
from ringfp4.errors import ArtifactError
from ringfp4.runtime import devices, info
from ringfp4.runtime.manifest import FILE_NAME, read_all
from ringfp4.runtime.plan import KernelTable


def describe_folder(folder: Path) -> tuple[list[str], bool]:
    """(lines about one folder, whether it is sound). Reads every cubin."""
    if folder == devices.PACKAGED and not (folder / FILE_NAME).exists():
        return ["none in this package: python -m ringfp4.build_cubins --out DIR makes some"], True
    try:
        (manifest,) = read_all([folder])
        for kernel in manifest.kernels:
            kernel.image()
    except ArtifactError as error:
        return [str(error)], False
    lines = [f"{len(manifest.kernels)} kernels in {folder}, every cubin as its manifest says"]
    for arch in manifest.archs:
        lines.append(f"{arch}: {KernelTable(manifest.kernels, (arch,)).shipped() or 'no whole linear'}")
    return lines, True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ringfp4", description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, metavar="DIR", help="artefact folders to look at")
    arguments = parser.parse_args(argv)
    report = info()
    print(f"ringfp4    {ringfp4.__version__}, PyTorch {torch.__version__}, Python {sys.version.split()[0]}")
    print(f"driver     {report['driver']}")
    sound = True
    for folder in (devices.PACKAGED, *arguments.folders):
        lines, good = describe_folder(folder)
        sound &= good
        print("artefacts  " + "\n           ".join(lines))
    found = report["devices"]
    assert isinstance(found, list)
    for device in found:
        print(
            f"device {device['device']}   {device['name']}, compute capability {device['capability']}, "
            f"{device['multiprocessors']} multiprocessors"
        )
        print(f"           serves {device['serves']}")
    if not found:
        print("devices    none: CPU tensors are computed by the reference implementation")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
