"""tools/compile_kernels counts how many programs of a kernel a multiprocessor holds, and how many
bytes its threads have in flight."""

import pytest

from tools.compile_kernels.flight import in_flight_amd, in_flight_nvidia, read_amd, read_nvidia
from tools.compile_kernels.occupancy import Occupancy, bytes_needed, occupancy
from tools.compile_kernels.targets import TARGETS

# --- programs on a multiprocessor -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "threads", "registers", "shared", "expected"),
    [
        ("sm_90", 256, 32, 0, Occupancy(8, 64, "threads")),
        ("sm_90", 256, 33, 0, Occupancy(6, 48, "registers")),  # 40 are allocated
        ("sm_90", 256, 64, 0, Occupancy(4, 32, "registers")),
        ("sm_90", 32, 255, 0, Occupancy(8, 8, "registers")),  # two in each of four parts
        ("sm_90", 512, 255, 0, Occupancy(0, 0, "registers")),  # cannot be launched
        ("sm_90", 32, 16, 0, Occupancy(32, 32, "blocks")),
        ("sm_90", 128, 16, 113 * 1024, Occupancy(2, 8, "shared memory")),
        ("sm_90", 128, 16, 114 * 1024, Occupancy(1, 4, "shared memory")),  # and 1 KiB each
        ("sm_80", 128, 16, 113 * 1024, Occupancy(1, 4, "shared memory")),
        # AMD's own numbers of waves per SIMD for 512 registers: 64 or fewer: 8, 72: 7, 128: 4
        ("gfx942", 256, 64, 0, Occupancy(8, 32, "threads")),
        ("gfx942", 256, 65, 0, Occupancy(7, 28, "registers")),
        ("gfx942", 256, 128, 0, Occupancy(4, 16, "registers")),
        ("gfx942", 64, 64, 0, Occupancy(16, 16, "blocks")),
    ],
)
def test_what_a_multiprocessor_holds(
    target: str, threads: int, registers: int, shared: int, expected: Occupancy
) -> None:
    assert occupancy(TARGETS[target], threads, registers, shared) == expected


def test_what_bandwidth_needs() -> None:
    """Little's law: 3.35e12 bytes per second · 273 ns = 914 kB on an H100, a 132nd of it on each
    multiprocessor."""
    assert bytes_needed(TARGETS["sm_90"]) == pytest.approx(914e3 / 132, rel=1e-3)
    assert bytes_needed(TARGETS["gfx942"]) is None


# --- bytes in flight ------------------------------------------------------------------------------


def listing(*instructions: tuple[str, int, int]) -> str:
    """Instructions as nvdisasm prints them: text, the barrier that it sets (7: none), and the mask
    of those that it waits for. A text that ends with a colon is a label."""
    rows = []
    for at, (text, sets, waits) in enumerate(instructions):
        if text.endswith(":"):
            rows.append(text)
            continue
        upper = (waits << 11 | 7 << 8 | sets << 5) << 41
        rows.append(f"        /*{16 * at:04x}*/       {text} ;      /* 0x{0:016x} */")
        rows.append(f"                                             /* 0x{upper:016x} */")
    return "\n".join(rows)


FIRST, SECOND = "LDG.E.128 R4, desc[UR4][R2.64]", "@!P0 LDG.E.128 R8, desc[UR4][R2.64+0x10]"
USE = "FADD R4, R4, R8"


@pytest.mark.parametrize(
    ("code", "most"),
    [
        ([(FIRST, 2, 0), (SECOND, 3, 0), (USE, 7, 0b1100)], 32),
        ([(FIRST, 2, 0), (SECOND, 2, 0), (USE, 7, 0b100)], 32),  # one barrier for both
        ([(FIRST, 2, 0), (USE, 7, 0b100), (SECOND, 3, 0)], 16),  # the first is waited for
        ([(FIRST, 2, 0), (SECOND, 3, 0b100)], 16),  # its address comes from the first
        ([(FIRST, 2, 0), ("LDG.E R8, desc[UR4][R2.64]", 3, 0)], 16),  # single numbers
        ([(FIRST, 2, 0), ("EXIT", 7, 0), (SECOND, 3, 0)], 16),  # another path
        # a loop that loads for its next iteration
        ([(".L_x_1:", 7, 0), (FIRST, 2, 0), (USE, 7, 0b1000), (SECOND, 3, 0),
          (USE, 7, 0b100), ("@P0 BRA `(.L_x_1)", 7, 0)], 32),
    ],
)  # fmt: skip
def test_loads_until_their_wait(code: list[tuple[str, int, int]], most: int) -> None:
    assert in_flight_nvidia(read_nvidia(listing(*code)), {16}) == most


def test_asynchronous_copies_are_not_counted() -> None:
    copy = "LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64]"
    assert in_flight_nvidia(read_nvidia(listing((FIRST, 2, 0), (copy, 7, 0))), {16}) is None


@pytest.mark.parametrize(("wait", "most"), [("vmcnt(2)", 48), ("vmcnt(1)", 32), ("lgkmcnt(0)", 64)])
def test_loads_until_their_wait_on_amd(wait: str, most: int) -> None:
    """After two loads and a store, `vmcnt(2)` waits for the first load, and `lgkmcnt` for none."""
    load = "buffer_load_dwordx4 v[2:5], v2, s[20:23], 0 offen"
    store = "global_store_dwordx4 v[0:1], v[2:5], off"
    code = [load, load, store, f"s_waitcnt {wait}", load, load]
    assert in_flight_amd(read_amd("\n".join(f"\t{row}" for row in code)), {16}) == most
