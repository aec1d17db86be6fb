"""The machine code of the NEON products: what stays in registers, and how many cycles a group takes.

A cross compiler's code is read, nothing runs. Whether sums stay in registers hangs on the order of the source
(csrc/linear_neon.h), and a compiler that loses it costs half of the speed without a single wrong number.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from infer.kernels.cpu import build
from tests.kernels.c_builds import ARM_COMPILER, arm_library, compile_c

DISASSEMBLER = shutil.which("aarch64-linux-gnu-objdump")
ANALYZERS = ("llvm-mca", *(f"llvm-mca-{version}" for version in range(24, 16, -1)))
MAX_STACK_ACCESSES = 14  # of vector registers in a loop over groups, that a processor hides
ITERATIONS = 100

# Cycles of a group, measured on a Neoverse N1 with gcc 12.2: eight or four rows of a quad, one of a tile
MEASURED = {
    "product_int8_8": 92.0,
    "product_int4_8": 100.0,
    "product_int8_4": 51.8,
    "product_int4_4": 57.9,
    "product_int8_1": 55.4,
    "product_int4_1": 79.0,
    "product_int8_one_digit_8": 56.0,
    "product_int4_one_digit_8": 66.7,
    "product_int8_one_digit_4": 29.5,
    "product_int4_one_digit_4": 38.1,
    "product_int8_one_digit_1": 36.0,
    "product_int4_one_digit_1": 56.6,
}
ALLOWED = 1.1  # times as many

pytestmark = pytest.mark.skipif(
    ARM_COMPILER is None or DISASSEMBLER is None,
    reason="no cross compiler for ARM; on Debian: apt-get install gcc-aarch64-linux-gnu",
)


@pytest.fixture(scope="module", params=["neoverse-n1", "neoverse-v1"])
def loops(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """The instructions of the loop over groups, by kernel; nothing else multiplies bytes."""
    if request.param == "neoverse-n1":
        compiled = arm_library("neon-dotprod")
    else:
        flags = [flag for flag in build._FLAGS if flag != "-shared"]
        compiled = compile_c(
            str(ARM_COMPILER), (*flags, f"-mcpu={request.param}", "-c"), [build.SOURCES / "linear.c"]
        )
    return {name: loop_over_groups(code) for name, code in functions(compiled).items() if multiplies(code)}


def functions(compiled: Path) -> dict[str, list[tuple[int, str]]]:
    """Address and text of every instruction, by function."""
    command = [str(DISASSEMBLER), "--disassemble", "--no-show-raw-insn", str(compiled)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, list[tuple[int, str]]] = {}
    for line in text.splitlines():
        if head := re.match(r"[0-9a-f]+ <(\w+)>:", line):
            code = found.setdefault(head[1], [])
        elif instruction := re.match(r" +([0-9a-f]+):\t(.*)", line):
            code.append((int(instruction[1], 16), instruction[2].strip()))
    return found


def multiplies(code: list[tuple[int, str]]) -> bool:
    return any(text.startswith(("sdot", "smmla")) for _, text in code)


def loop_over_groups(code: list[tuple[int, str]]) -> list[str]:
    """The shortest loop with the most products of bytes."""
    best: tuple[int, int, list[str]] | None = None
    for address, text in code:
        jump = re.match(r"(?:b\.\w+|b|cbn?z)\s+(?:\w+, )?([0-9a-f]+) <", text)
        if jump and (start := int(jump[1], 16)) < address:
            body = [text for at, text in code if start <= at <= address]
            found = sum(text.startswith(("sdot", "smmla")) for text in body), -len(body), body
            best = max(best, found) if best else found
    assert best is not None and best[0] >= 16
    return best[2]


def test_every_kernel_is_there(loops: dict[str, list[str]]) -> None:
    one_size = {f"product_{kind}_{rows}" for kind in ("int8", "int4") for rows in ("8", "4", "2", "1")}
    assert one_size | set(MEASURED) | {f"{name}_ahead" for name in MEASURED if name[-1] in "48"} <= set(loops)


def test_sums_stay_in_registers(loops: dict[str, list[str]]) -> None:
    on_stack = re.compile(r"(ld|st)\w+\s+[qd]\d+.*\[sp")
    found = {name: sum(bool(on_stack.match(text)) for text in body) for name, body in loops.items()}
    assert all(count <= MAX_STACK_ACCESSES for count in found.values()), found


def test_one_row_asks_for_nothing_ahead_and_the_first_of_many_does(loops: dict[str, list[str]]) -> None:
    asks = {name for name, body in loops.items() if any(text.startswith("prfm") for text in body)}
    assert asks == {name for name in loops if name.endswith("_ahead")}


def test_a_group_takes_the_cycles_that_were_measured(loops: dict[str, list[str]], tmp_path: Path) -> None:
    """As LLVM models a Neoverse N1: its own model is there from version 17 on."""
    analyzer = next((path for name in ANALYZERS if (path := shutil.which(name)) and is_recent(path)), None)
    if analyzer is None:
        pytest.skip("needs llvm-mca 17 or later; on Debian: apt-get install llvm-19")
    if any("smmla" in text for body in loops.values() for text in body):
        pytest.skip("measured on a processor without i8mm")
    for name, measured in MEASURED.items():
        assert cycles(analyzer, loops[name], tmp_path) <= ALLOWED * measured, name


def is_recent(analyzer: str) -> bool:
    answer = subprocess.run([analyzer, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"version (\d+)", answer)
    return version is not None and int(version[1]) >= 17


def cycles(analyzer: str, body: list[str], scratch: Path) -> float:
    jumps = re.compile(r"(b\.\w+|b|cbn?z)\s")
    path = scratch / "loop.s"
    path.write_text("".join(f"{text.split('<')[0]}\n" for text in body if not jumps.match(text)))
    target = ["-mtriple=aarch64", "-mcpu=neoverse-n1", "-mattr=+dotprod", f"-iterations={ITERATIONS}"]
    answer = subprocess.run([analyzer, *target, str(path)], capture_output=True, text=True, check=True).stdout
    total = re.search(r"Total Cycles: +(\d+)", answer)
    assert total is not None, answer
    return int(total[1]) / ITERATIONS
