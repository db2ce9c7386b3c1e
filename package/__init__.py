"""ringfp4: NVFP4 linear layers for consumer Blackwell, compiled ahead of time.

``ringfp4.runtime`` is what a user imports; ``ringfp4.build_cubins`` rebuilds the
kernels for other shapes; ``ringfp4.dsl`` is the device code, imported at build time only.
"""

__version__ = "0.1.0"  # the only place: pyproject.toml and every manifest read it from here
