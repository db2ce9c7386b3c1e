"""ringfp4: NVFP4 linear layers for consumer Blackwell, compiled ahead of time.

``ringfp4.runtime`` is what a user imports; ``ringfp4.build_cubins`` rebuilds the
kernels for other shapes; ``ringfp4.dsl`` is the device code, imported at build time only.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("ringfp4")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"
