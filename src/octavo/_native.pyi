"""Types of the native module; written by scripts/native-stub, do not edit."""

import enum
from collections.abc import Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

class Region:
    """Zeroed anonymous memory on huge pages where the system allows."""

    def __init__(self, bytes: int) -> None: ...
    @staticmethod
    def map_file(path: str, bytes: int, writable: bool) -> Region:
        """The first bytes of a file, to be read in place or (writable) filled."""

    def flush(self) -> None:
        """Of a file being filled: writes it out and lets go of its memory."""

    @property
    def bytes(self) -> NDArray[numpy.uint8]:
        """All of it, to be read."""

    @property
    def size(self) -> int: ...
    @property
    def used(self) -> int: ...

class Form(enum.Enum):
    F32 = 0

    BF16 = 1

    W8 = 2

    W4 = 3

    Lut4 = 4

    Lut4F = 5

    E4M3 = 6

    E5M2 = 7

class PackedWeight:
    """A weight matrix in panels of 16 columns."""

    def __init__(
        self,
        region: Region,
        form: Form,
        columns: int,
        k: int,
        group: int = 0,
        zero: int = 0,
        minimum: bool = False,
        scale_f16: bool = False,
        rotation: int = 0,
        table: NDArray[numpy.float32] | None = None,
    ) -> None: ...
    @staticmethod
    def bytes_needed(
        form: Form, columns: int, k: int, group: int = 0, minimum: bool = False, scale_f16: bool = False
    ) -> int: ...
    def pack_f32(self, target: NDArray[numpy.int32], values: NDArray[numpy.float32]) -> None: ...
    def pack_bf16(self, target: NDArray[numpy.int32], values: NDArray[numpy.uint16]) -> None: ...
    def pack_affine(
        self,
        target: NDArray[numpy.int32],
        codes: NDArray[numpy.uint8],
        scales: NDArray[numpy.float32],
        minimums: NDArray[numpy.float32] | None = None,
    ) -> None: ...
    def pack_codes(
        self, target: NDArray[numpy.int32], codes: NDArray[numpy.uint8], scales: NDArray[numpy.float32]
    ) -> None: ...
    def column(self, index: int) -> NDArray[numpy.float32]: ...
    @property
    def form(self) -> Form: ...
    @property
    def columns(self) -> int: ...
    @property
    def padded_columns(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def k_padded(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def offset(self) -> int:
        """Where it begins in its region."""

class PackingJob:
    """
    Rows of a tensor as a file holds them, and the packed columns they go to.
    """

    def __init__(
        self,
        weight: PackedWeight,
        kind: str,
        bytes: NDArray[numpy.uint8],
        order: NDArray[numpy.int64] | None,
        target: NDArray[numpy.int32],
        mapped: bool,
    ) -> None:
        """
        kind: a GGUF type. order: the stored row of each (of all that bytes hold). mapped: pages are let go once read.
        """

def pack_stored(jobs: Sequence[PackingJob], threads: int, level: str = "") -> None:
    """
    Dense rows for w8 and w4 weights are rounded as octavo.quantization does; OverflowError if they cannot be.
    """

def checksum64(bytes: NDArray[numpy.uint8]) -> int:
    """A fast 64-bit checksum, to find damage."""

def read_strings(bytes: NDArray[numpy.uint8], position: int, count: int, longest: int) -> tuple[list[str], int]:
    """
    The strings (each behind its 64-bit length) up to one too long or not UTF-8, and where that begins.
    """

class SamplerBase:
    @property
    def vocab(self) -> int: ...
    @property
    def max_rows(self) -> int: ...
    @property
    def max_top(self) -> int: ...
    @property
    def max_workers(self) -> int: ...

class Sampler(SamplerBase):
    def __init__(self, vocab: int, max_rows: int, max_top: int, max_workers: int, level: str = "") -> None:
        """
        level: instruction-set level (empty: the best one here), which changes no result.
        """

    @property
    def records(self) -> NDArray[numpy.uint8]: ...
    @property
    def tokens(self) -> NDArray[numpy.int32]: ...
    @property
    def logprobs(self) -> NDArray[numpy.float32]: ...
    @property
    def ranks(self) -> NDArray[numpy.int32]: ...
    @property
    def statuses(self) -> NDArray[numpy.int32]: ...
    def set_pools(
        self, lists: NDArray[numpy.int32], top_ids: NDArray[numpy.int32], top_logprobs: NDArray[numpy.float32]
    ) -> None: ...
    def sample(self, logits: NDArray[numpy.float32], n_rows: int) -> None:
        """Runs rows 0 to n_rows - 1 one after another; changes the logits."""

    def sample_row(self, row: int, logits: NDArray[numpy.float32], worker: int = 0) -> None:
        """Runs one row; changes the logits."""

def sampler_exp(level: str, x: NDArray[numpy.float32], out: NDArray[numpy.float32]) -> None:
    """out = e^x as the sampler computes it, for x of at most 0."""

def sampler_log(arg: float, /) -> float: ...
def green_list(previous: int, vocab: int, out: NDArray[numpy.int32]) -> None:
    """
    Fills out with the first tokens of the watermark's permutation of the vocabulary after a token.
    """

def philox4x32(arg0: tuple[int, int, int, int], arg1: tuple[int, int], /) -> tuple[int, int, int, int]: ...

class Act(enum.Enum):
    F32 = 0

    BF16 = 1

    I8 = 2

class KvType(enum.Enum):
    F32 = 0

    BF16 = 1

    F16 = 2

    E4M3 = 3

    E5M2 = 4

    E4M3Scaled = 5

    I8 = 6

    I4 = 7

class Epilogue(enum.Enum):
    Store = 0

    Add = 1

    SiluMul = 2

    GeluMul = 3

    GeluTanhMul = 4

    Gelu = 5

    GeluTanh = 6

    Silu = 7

    Relu = 8

    Relu2 = 9

    ClampedSiluMul = 10

class Scoring(enum.Enum):
    Softmax = 0

    Sigmoid = 1

    SoftmaxOfChosen = 2

class Elementwise(enum.Enum):
    Add = 0

    Scale = 1

    Softcap = 2

    SiluMul = 3

    GeluMul = 4

    GeluTanhMul = 5

    Gelu = 6

    GeluTanh = 7

    Silu = 8

    Relu = 9

    Relu2 = 10

    Clip = 11

    SigmoidGate = 12

class Activation:
    """Where a value lies in the arena; offsets in bytes."""

    def __init__(
        self,
        form: Act,
        width: int,
        data: int,
        group: int = 32,
        scales: int = 0,
        scaled_sums: int = 0,
        sums: int = 0,
        rotation: int = 0,
    ) -> None: ...
    @property
    def form(self) -> Act: ...
    @property
    def width(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def data(self) -> int: ...
    @property
    def scales(self) -> int: ...
    @property
    def scaled_sums(self) -> int: ...
    @property
    def sums(self) -> int: ...

class Plan:
    """
    A compiled model: operations over one arena, run for a whole step in one call.
    """

    def __init__(
        self,
        level: str,
        threads: int,
        max_tokens: int,
        max_sequences: int,
        table_stride: int,
        head_rows: int,
        vocab: int,
        arena_bytes: int,
    ) -> None: ...
    def add_embed(
        self,
        name: str,
        weight: PackedWeight,
        out: Activation,
        scale: float = 1.0,
        positions: bool = False,
        offset: int = 0,
    ) -> None: ...
    def add_norm(
        self,
        name: str,
        x: Activation,
        width: int,
        weight: NDArray[numpy.float32] | None,
        bias: NDArray[numpy.float32] | None,
        eps: float,
        layer: bool,
        out: Activation,
        gather: bool = False,
        order: NDArray[numpy.int32] | None = None,
    ) -> None: ...
    def add_linear(
        self,
        name: str,
        weight: PackedWeight,
        x: Activation,
        bias: NDArray[numpy.float32] | None,
        epilogue: Epilogue,
        out: Activation,
        out_columns: int,
    ) -> None: ...
    def add_rope_tables(self, cos: NDArray[numpy.float32], sin: NDArray[numpy.float32]) -> int: ...
    def add_query_factors(self, factors: NDArray[numpy.float32]) -> int: ...
    def add_rope(
        self,
        name: str,
        qkv: Activation,
        layer: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        rope_dim: int,
        tables: int,
        q_norm: NDArray[numpy.float32] | None,
        k_norm: NDArray[numpy.float32] | None,
        norm_eps: float,
        q: Activation,
        norm_layer: bool = False,
        wide_norms: bool = False,
        norm_after: bool = False,
        factors: int = -1,
    ) -> None: ...
    def add_attention(
        self,
        name: str,
        q: Activation,
        layer: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        softcap: float,
        window: int,
        out: Activation,
        slopes: NDArray[numpy.float32] | None = None,
        chunked: bool = False,
        sinks: NDArray[numpy.float32] | None = None,
    ) -> None: ...
    def add_route(
        self,
        name: str,
        logits: Activation,
        experts: int,
        top_k: int,
        scoring: Scoring,
        renormalize: bool,
        scale: float,
        correction: NDArray[numpy.float32] | None,
        groups: int,
        top_groups: int,
        group_pairs: bool,
        out: Activation,
    ) -> None: ...
    def add_experts(
        self,
        name: str,
        route: Activation,
        top_k: int,
        x: Activation,
        gate_up: Sequence[PackedWeight],
        gate_up_bias: NDArray[numpy.float32] | None,
        activation: Epilogue,
        alpha: float,
        limit: float,
        hidden: Activation,
        down: Sequence[PackedWeight],
        down_bias: NDArray[numpy.float32] | None,
        add: bool,
        out: Activation,
        out_columns: int,
        scale_inputs: bool = False,
    ) -> None: ...
    def add_head_linear(
        self,
        name: str,
        weights: Sequence[PackedWeight],
        x: Activation,
        in_first: int,
        in_step: int,
        out: Activation,
        out_first: int,
        out_step: int,
    ) -> None: ...
    def add_latent(
        self,
        name: str,
        layer: int,
        q: Activation,
        q_first: int,
        q_step: int,
        kv: Activation,
        kv_first: int,
        heads: int,
        rank: int,
        rope_dim: int,
        interleaved: bool,
        tables: int,
        norm: NDArray[numpy.float32],
        norm_eps: float,
        q_out: Activation,
    ) -> None: ...
    def add_elementwise(
        self,
        name: str,
        kind: Elementwise,
        a: Activation,
        b: Activation | None,
        width: int,
        scalar: float,
        out: Activation,
    ) -> None: ...
    def set_bidirectional(self) -> None:
        """
        Has every token attend to the whole of its sequence; before the first attention.
        """

    def begin_head(self) -> None: ...
    def set_logits(self, logits: Activation) -> None: ...
    def make_pool(self, blocks: int, kv: KvType, scales: NDArray[numpy.float32] | None = None) -> None: ...
    def prefault_pool(self, bytes: int) -> None: ...
    @property
    def pool_prefaulted(self) -> bool: ...
    def copy_blocks(self, pairs: NDArray[numpy.int32]) -> None: ...
    def run(
        self,
        sequences: int,
        rows: int,
        sampler: SamplerBase | None = None,
        logits: NDArray[numpy.float32] | None = None,
    ) -> None: ...
    @property
    def tokens(self) -> NDArray[numpy.int32]: ...
    @property
    def starts(self) -> NDArray[numpy.int32]: ...
    @property
    def counts(self) -> NDArray[numpy.int32]: ...
    @property
    def logit_rows(self) -> NDArray[numpy.int32]: ...
    @property
    def block_tables(self) -> NDArray[numpy.int32]: ...
    @property
    def arena(self) -> NDArray[numpy.uint8]: ...
    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""

    @property
    def threads(self) -> int: ...
    @property
    def level(self) -> str: ...
    def set_profiling(self, on: bool) -> None: ...
    def profile(self) -> list[dict[str, Any]]: ...
    def linears(self) -> list[dict[str, Any]]:
        """
        The products of the plan in the order they were added, body before head: what tiles are chosen for.
        """

    def linear_times(self) -> list[tuple[int, float]]:
        """
        Rows and seconds of every linear in the last run; the seconds when it was profiled.
        """

    def set_tile(
        self, linear: int, first_rows: int, last_rows: int, row_tile: int, column_tile: int, regions: int
    ) -> None: ...
    def clear_tiles(self) -> None:
        """Goes back to the built-in tiles."""

    def tile_of(self, linear: int, rows: int) -> tuple[int, int, int]:
        """
        Row tile, column tile and regions that a linear of this many rows is cut into.
        """

def available_levels() -> list[str]:
    """Instruction-set levels compiled in and runnable here, worst first."""

def measure_machine(level: str, threads: int, seconds: float = 0.2) -> dict[str, float]: ...
