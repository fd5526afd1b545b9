"""Compiling the Triton kernels for GPUs that are not there, and reading from the machine code what they need.

What is compiled is what would be launched: the launchers run on tensors without memory, and their launches are noted instead of made.
"""

import collections
import contextlib
import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TOOLS = Path(nvidia.__file__).parent / "bin"
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes of shared memory that a program may use, by compute capability."""
MAX_REGISTERS = 255
"""Of a thread."""
_TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.bool: "*i1", torch.int64: "*i64"}


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel with all that decides its code."""

    kernel: JITFunction
    signature: tuple[tuple[str, str], ...]
    """Type of each argument that is given at run time, by name."""
    constants: tuple[tuple[str, object], ...]
    """Value of each that is known to the compiler."""
    warps: int
    stages: int

    @property
    def name(self) -> str:
        return self.kernel.__name__


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a compiled kernel takes of a GPU."""

    registers: int
    """Of a thread."""
    stack: int
    """Bytes of a thread that registers were spilled to."""
    shared: int
    """Bytes of a program."""
    loops: tuple[collections.Counter, ...]
    """Instructions of each loop of the machine code by name, the longest loop first."""
    products: int
    """Tensor core instructions in all."""


@contextlib.contextmanager
def noted_launches() -> Iterator[list[Launch]]:
    """Within `with` no kernel runs; the list holds each launch once."""
    launches: dict[Launch, None] = {}
    result: list[Launch] = []

    def note(kernel, *arguments, grid, warmup, num_warps, num_stages=3, **constants):
        launch = _launch(kernel, arguments, constants, num_warps, num_stages)
        if launch not in launches:
            launches[launch] = None
            result.append(launch)

    with mock.patch.object(JITFunction, "run", note):
        yield result


def _launch(kernel: JITFunction, arguments: tuple, constants: dict, warps: int, stages: int) -> Launch:
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | constants
    assert values.keys() == set(kernel.arg_names)
    signature = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            signature[name] = _TYPES[value.dtype]
        elif name not in constants and value is not None:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    fixed = {name: value for name, value in values.items() if name not in signature}
    return Launch(kernel, tuple(signature.items()), tuple(fixed.items()), warps, stages)


def compiled(launch: Launch, capability: int) -> Needs:
    """Compile a launch for a compute capability, such as 90, and read its machine code.  Raises whatever the compiler does."""
    names, types = launch.kernel.arg_names, dict(launch.signature)
    signature = {name: types.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in launch.constants}
    # as the launcher finds for tensors of torch
    attributes = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if types.get(name, "").startswith("*")}
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": True}
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True)
        code = subprocess.run([TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout + usage.stderr)
    products = len(re.findall(r"\b(?:HMMA|HGMMA|UTCHMMA|UTCQMMA)\b", code))
    return Needs(int(found[1]), int(found[2]), kernel.metadata.shared, tuple(_loops(code)), products)


_LABEL, _INSTRUCTION, _BRANCH = re.compile(r"^(\.L_x_\d+):"), re.compile(r"^/\*[0-9a-f]+\*/\s+(.*?);"), re.compile(r"\((\.L_x_\d+)\)")
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")


def _loops(code: str) -> list[collections.Counter]:
    """Every stretch between a branch back and where it leads."""
    labels, instructions = {}, []
    for line in map(str.strip, code.splitlines()):
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif instruction := _INSTRUCTION.match(line):
            instructions.append(_PREDICATE.sub("", instruction[1]))
    found = []
    for place, instruction in enumerate(instructions):
        target = _BRANCH.search(instruction) if instruction.startswith("BRA") else None
        if target and labels.get(target[1], place) < place:
            body = instructions[labels[target[1]] : place + 1]
            found.append(collections.Counter(text.split()[0].split(".")[0] for text in body))
    return sorted(found, key=lambda loop: -loop.total())
