"""Importing megahedge puts large tensors on huge pages, unless the user has said otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
CODE = """
import megahedge, torch
tensor = torch.ones(16 << 20)  # 64 MiB, written to
rollup = open("/proc/self/smaps_rollup").read()
print(next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("AnonHugePages")))
"""


@pytest.mark.skipif(not SWITCH.is_file() or "[never]" in SWITCH.read_text(), reason="the kernel gives no huge pages")
@pytest.mark.parametrize(("given", "huge"), [(None, True), ("0", "[always]" in (SWITCH.read_text() if SWITCH.is_file() else ""))])
def test_large_tensors_lie_on_huge_pages(given, huge):
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    environment |= {} if given is None else {"THP_MEM_ALLOC_ENABLE": given}
    found = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True)
    assert (int(found.stdout) > 0) is huge
