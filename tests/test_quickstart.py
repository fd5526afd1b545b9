"""scripts/quickstart.sh from the prepared environment to the table, and a second start that repeats nothing."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


def quickstart(out: Path) -> str:
    environment = os.environ | {"STAGE1_TOKENS": "4K", "STAGE2_TOKENS": "4K"}
    shown = subprocess.run(["bash", "scripts/quickstart.sh", str(out)], cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stdout[-3000:] + shown.stderr[-3000:]
    return shown.stdout


@pytest.mark.slow
@pytest.mark.skipif(not (REPOSITORY / ".venv/bin/deepspeed").exists(), reason="quickstart.sh would install into .venv, which is not there")
def test_quickstart_ends_with_a_table_and_a_model_and_is_not_repeated(tmp_path):
    shown = quickstart(tmp_path)
    lines = shown.splitlines()
    header = next(number for number, line in enumerate(lines) if line.endswith("× teacher"))
    table = lines[header + 1 : header + 7]
    names = ["teacher", "stage1-paper", "stage1-tuned", "hedgehog", "hedgemamba-paper", "hedgemamba-tuned"]
    assert [line.split()[0] for line in table] == names
    assert float(table[0].split()[-1]) == 1.0 and all(float(line.split()[-1]) > 1 for line in table[1:])
    assert json.loads((tmp_path / "hedgemamba-hf" / "config.json").read_text())["model_type"] == "hedge_mamba"
    assert "The harbour was" in shown

    (tmp_path / "results" / "hedgehog.json").unlink()
    shutil.rmtree(tmp_path / "hedgemamba-hf")
    again = [line for line in quickstart(tmp_path).splitlines() if line.startswith("$ ")]
    assert [line.split()[2] for line in again] == ["scripts/evaluate.py", "tools/convert_to_hf.py", "scripts/generate.py"]
