"""scripts/compare_results.py: results beside each other, where they are of the same kind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "compare_results.py"


def write_result(folder, name, perplexity, seq_len=256):
    record = {
        "figures": {"loss": 3.0, "token_perplexity": perplexity, "bits_per_byte": None, "tokens": 1000},
        "data": {"idx_sha256": "a", "bin_blocks_sha256": "b"},
        "options": {"seq_len": seq_len},
    }
    (folder / f"{name}.json").write_text(json.dumps(record))
    return str(folder / f"{name}.json")


def compare(*files):
    return subprocess.run([sys.executable, str(SCRIPT), "--results", *files], capture_output=True, text=True)


def test_every_model_is_measured_by_the_first(tmp_path):
    shown = compare(write_result(tmp_path, "teacher", 20.0), write_result(tmp_path, "student", 25.0))
    assert shown.returncode == 0, shown.stderr
    rows = [line.split() for line in shown.stdout.splitlines()[1:]]
    assert rows == [["teacher", "3.0000", "20.000", "-", "1.000"], ["student", "3.0000", "25.000", "-", "1.250"]]


@pytest.mark.parametrize(
    ("seq_len", "text", "message"),
    [
        (512, None, "student was scored on other data or windows than teacher"),
        (256, '{"figures": {}}', "holds no perplexity"),
        (256, '{"figures": null}', "holds no perplexity"),
    ],
)
def test_what_does_not_compare_is_refused(tmp_path, seq_len, text, message):
    files = write_result(tmp_path, "teacher", 20.0), write_result(tmp_path, "student", 25.0, seq_len)
    if text is not None:
        Path(files[1]).write_text(text)
    shown = compare(*files)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert message in shown.stderr and "Traceback" not in shown.stderr
