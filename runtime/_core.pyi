"""Types of the extension module: what C++ takes and gives. See src/bindings.cpp."""

from collections.abc import Sequence as Seq

BUFFERS: tuple[str, ...]
SYMBOLS: tuple[str, ...]
STATE_BYTES: int
SCALE_OFFSET: int
COUNTERS_OFFSET: int
COUNTER_BYTES: int
FLAGS_OFFSET: int

class Driver:
    def __init__(self, path: str) -> None: ...
    @property
    def version(self) -> int: ...
    def device_count(self) -> int: ...

class Device:
    def __init__(self, driver: Driver, ordinal: int) -> None: ...
    @property
    def ordinal(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def capability(self) -> tuple[int, int]: ...
    @property
    def sms(self) -> int: ...

class Context:
    def __init__(self, device: Device) -> None: ...
    def capturing(self, stream: int) -> bool: ...
    @property
    def status(self) -> list[int]: ...

class Param:
    def __init__(
        self,
        name: str,
        kind: str,
        dtype: str,
        dims: Seq[int | str],
        strides: Seq[int],
        box: Seq[int],
        swizzle: int,
        size: int,
    ) -> None: ...

class Kernel:
    def __init__(
        self,
        context: Context,
        image: bytes,
        name: str,
        entry: str,
        threads: int,
        smem_bytes: int,
        cluster: tuple[int, int, int],
        cooperative: bool,
        programmatic: bool,
        grid: tuple[int, int, int],
        params: Seq[Param],
    ) -> None: ...
    @property
    def name(self) -> str: ...
    def ctas(self, m: int) -> int: ...
    @property
    def max_ctas(self) -> int: ...

class Ring:
    def __init__(self, context: Context, data_bytes: int, stream: int, shared: bool) -> None: ...
    @property
    def data_bytes(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def data(self) -> int: ...
    @property
    def state(self) -> int: ...

class Sequence:
    def __init__(
        self,
        reduce: Seq[Kernel],
        whole: Seq[Kernel],
        each_chunk: Seq[Kernel],
        capacity_rows: int,
        q_row_bytes: int,
        sf_row_bytes: int,
        y_row_bytes: int,
    ) -> None: ...
    def run(
        self,
        ring: Ring | None,
        stream: int,
        m: int,
        x_stride: int = 0,
        rule: int = 0,
        x: int = 0,
        scale: int = 0,
        w: int = 0,
        w_sf: int = 0,
        w_scale: int = 0,
        bias: int = 0,
        y: int = 0,
        packed: int = 0,
        slots: int = 0,
        state: int = 0,
        partials: int = 0,
    ) -> None: ...
