"""What CuTe DSL's own host code launches, observed without a GPU.

``python dsl_capture.py OUT`` reads a pickled list of (configuration, architecture, [arguments of
a launch]) from standard input, all of one architecture, and writes a JSON list with one list of
launches for each. A process of its own, since the DSL reads its architecture when imported.

The arguments are {name of the host function's parameter: int, or Tensor for a tensor}.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import json
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COOPERATIVE, CLUSTER = 2, 4  # launch attributes


@dataclass(frozen=True)
class Tensor:
    """A tensor argument: address and extents, outermost first; compact. No extents if all are compiled in."""

    address: int
    shape: tuple[int, ...]


class TensorArgument(ctypes.Structure):
    """As exported code takes it: the address, then the extents and strides that are not constant."""

    _fields_ = (("address", ctypes.c_uint64), ("rest", ctypes.c_uint8 * 64))


def compile_host(config: Any) -> tuple[Any, list[str], list[Any]]:
    """The compiled object, the host function's parameter names and the arguments it was compiled for."""
    import cutlass.cute as cute
    from ringfp4.build_cubins.job import kernel_module

    seen: list[Any] = []
    original = cute.compile

    def recording(host: Any, *arguments: Any) -> Any:
        seen[:] = [host, *arguments]
        return original(host, *arguments)

    cute.compile = recording
    try:
        compiled = importlib.import_module(kernel_module(config)).compile_kernel(config)
    finally:
        cute.compile = original
    names = [name for name in inspect.signature(type(seen[0]).__call__).parameters if name != "self"]
    return compiled, names, seen[1:]


class Host:
    """The host function of one kernel, linked with dsl_host.c."""

    def __init__(self, config: Any, folder: Path) -> None:
        from ringfp4.build_cubins.ptx import read_ptx

        self.compiled, self.names, self.example = compile_host(config)
        self.param_sizes = read_ptx(self.compiled.__ptx__).params
        obj, library = folder / f"{config.name}.o", folder / f"{config.name}.so"
        obj.write_bytes(self.compiled.dump_to_object("host"))
        source = Path(__file__).parent / "dsl_host.c"
        # Bound to dsl_host.c, not to the DSL's runtime that this process has loaded.
        command = ["cc", "-shared", "-fPIC", "-Wl,-Bsymbolic", "-o", library, source, obj]
        subprocess.run(command, check=True)
        self.library = ctypes.CDLL(str(library))
        self.entry = getattr(self.library, f"_mlir_host__mlir_ciface_{self.compiled.function_name}")
        self._load()

    def _global(self, kind: Any, name: str) -> Any:
        return kind.in_dll(self.library, name)

    def _call(self, function: Any, *values: Any) -> None:
        addresses = [ctypes.addressof(value) for value in values]
        function((ctypes.c_void_p * len(values))(*addresses), len(values))

    def _load(self) -> None:
        """The exported module wants to be loaded before the first launch."""
        handle, result, device = ctypes.c_void_p(), ctypes.c_int32(), ctypes.c_int32()
        pointer = ctypes.c_void_p(ctypes.addressof(handle))
        self._call(self.library._mlir_host_cuda_init, pointer, result)
        self._call(self.library._mlir_host_cuda_load_to_device, pointer, device, result)
        if result.value:
            raise RuntimeError(f"the host code failed to load: {result.value}")

    def launch(self, arguments: dict[str, Any]) -> dict[str, Any]:
        values = [
            self._argument(name, example, arguments)
            for name, example in zip(self.names, self.example, strict=True)
            if example is not None
        ]
        self._global(ctypes.c_int, "param_count").value = len(self.param_sizes)
        self._global(ctypes.c_int * 32, "param_sizes")[: len(self.param_sizes)] = self.param_sizes
        before = self._global(ctypes.c_uint, "launches").value
        result = ctypes.c_int32()
        self._call(self.entry, *values, result)
        if result.value or self._global(ctypes.c_uint, "launches").value != before + 1:
            raise RuntimeError(f"the host code did not launch once: {result.value}")
        return self._launched()

    def _argument(self, name: str, example: Any, arguments: dict[str, Any]) -> Any:
        value = arguments.get(name, 0)
        if not isinstance(value, Tensor):
            return ctypes.c_int64(value)  # narrower integers are read from its first bytes
        if not any(example.dynamic_shapes_mask) and not any(example.dynamic_strides_mask):
            return TensorArgument(value.address)
        strides = [1]
        for extent in reversed(value.shape[1:]):
            strides.insert(0, strides[0] * extent)
        stride_bytes = 4 if example._use_32bit_stride else 8
        rest = b"".join(
            v.to_bytes(4, "little")
            for v, d in zip(value.shape, example.dynamic_shapes_mask, strict=True)
            if d
        )
        rest += bytes(-len(rest) % stride_bytes)
        for stride, dynamic in zip(strides, example.dynamic_strides_mask, strict=True):
            rest += stride.to_bytes(stride_bytes, "little") if dynamic else b""
        return TensorArgument(value.address, (ctypes.c_uint8 * 64)(*rest))

    def _launched(self) -> dict[str, Any]:
        count = self._global(ctypes.c_uint, "attribute_count").value
        attributes = self._global(ctypes.c_uint * (18 * 8), "attributes")
        found = {attributes[18 * i]: list(attributes[18 * i + 2 : 18 * i + 5]) for i in range(count)}
        raw = bytes(self._global(ctypes.c_uint8 * 4096, "params"))
        params, at = [], 0
        for size in self.param_sizes:
            params.append(raw[at : at + size].hex())
            at += size
        return {
            "grid": list(self._global(ctypes.c_uint * 3, "grid")),
            "block": list(self._global(ctypes.c_uint * 3, "block")),
            "smem": self._global(ctypes.c_size_t, "smem").value,
            "cluster": found.get(CLUSTER, [1, 1, 1]),
            "cooperative": found.get(COOPERATIVE, [0])[0],
            "params": params,
        }


def capture(tasks: list[tuple[Any, str, list[dict[str, Any]]]]) -> list[list[dict[str, Any]]]:
    """Launches of several kernels of one architecture, observed in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "launches.json"
        command = [sys.executable, __file__, out]
        subprocess.run(command, input=pickle.dumps(tasks), check=True, timeout=300)
        found: list[list[dict[str, Any]]] = json.loads(out.read_text())
    return found


def main() -> None:
    # Unpickling needs the classes under the name they were pickled by.
    sys.modules["dsl_capture"] = sys.modules["__main__"]
    tasks = pickle.load(sys.stdin.buffer)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(
            CUTE_DSL_ARCH=tasks[0][1],
            CUTE_DSL_KEEP_PTX="1",
            CUTE_DSL_KEEP_CUBIN="1",
            CUTE_DSL_DUMP_DIR=folder,
        )
        launches = []
        for config, _, arguments in tasks:
            host = Host(config, Path(folder))
            launches.append([host.launch(each) for each in arguments])
    Path(sys.argv[1]).write_text(json.dumps(launches))


if __name__ == "__main__":
    main()
