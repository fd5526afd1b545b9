"""scripts/compare_results.py: results beside each other, where they are of the same kind."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megahedge.utils.errors import InputError

SCRIPT = Path(__file__).parents[1] / "scripts" / "compare_results.py"


def write_result(folder, name, perplexity=20.0, **options):
    """A file as evaluate.py writes it; options of that name replace figures."""
    figures = {"loss": 3.0, "token_perplexity": perplexity, "bits_per_byte": None, "tokens": 1000}
    record = {
        "figures": {figure: options.pop(figure, value) for figure, value in figures.items()},
        "data": {"idx_sha256": "a", "bin_blocks_sha256": "b"},
        "options": {"seq_len": 256, "dtype": "fp32"} | options,
    }
    (folder / f"{name}.json").write_text(json.dumps(record))
    return str(folder / f"{name}.json")


@pytest.fixture
def compare(monkeypatch, capsys):
    """A function from files to the lines that are printed."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    script = importlib.import_module("compare_results")

    def run(*files):
        monkeypatch.setattr(sys, "argv", ["compare_results.py", "--results", *files])
        script.main()
        return capsys.readouterr().out.splitlines()

    return run


def test_every_model_is_measured_by_the_first(tmp_path):
    files = write_result(tmp_path, "teacher", 20.0), write_result(tmp_path, "student", 25.0)
    shown = subprocess.run([sys.executable, str(SCRIPT), "--results", *files], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    rows = [line.split() for line in shown.stdout.splitlines()[1:]]
    assert rows == [["teacher", "3.0000", "20.000", "-", "1.000"], ["student", "3.0000", "25.000", "-", "1.250"]]


@pytest.mark.parametrize(("teacher", "student", "shown"), [(20.0, None, ["20.000", "-"]), (None, 20.0, ["-", "20.000"])])
def test_a_perplexity_that_is_too_large_for_a_number_is_left_out(compare, tmp_path, teacher, student, shown):
    """As evaluate.py leaves it out of a model that has diverged."""
    lines = compare(write_result(tmp_path, "teacher", teacher), write_result(tmp_path, "student", student, loss=800.0))
    assert [line.split()[2] for line in lines[1:]] == shown
    assert lines[2].split()[-1] == "-"


def test_results_of_two_precisions_are_not_compared_without_a_remark(compare, tmp_path):
    files = write_result(tmp_path, "teacher"), write_result(tmp_path, "student", dtype="bf16")
    assert len(compare(files[0], files[0])) == 3
    assert compare(*files)[-1] == "student was scored in bf16, teacher in fp32: a part of their difference is rounding"


@pytest.mark.parametrize("options", [{"seq_len": 512}, {"reset_at_documents": True}, {"tokens": 999}])
def test_what_was_scored_otherwise_is_refused(compare, tmp_path, options):
    with pytest.raises(InputError, match="student was scored on other data or windows than teacher"):
        compare(write_result(tmp_path, "teacher"), write_result(tmp_path, "student", **options))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is damaged"),
        ('{"figures": {}}', "holds no perplexity"),
        ('{"figures": null}', "holds no perplexity"),
        ({"loss": None}, "holds no perplexity"),
        ({"perplexity": 0}, "holds no perplexity"),
        ({"perplexity": "20"}, "holds no perplexity"),
        ({"perplexity": float("nan")}, "holds no perplexity"),
        ({"bits_per_byte": []}, "holds no perplexity"),
    ],
)
def test_what_is_no_result_is_refused(compare, tmp_path, text, message):
    student = write_result(tmp_path, "student", **(text if isinstance(text, dict) else {}))
    if text is None:
        Path(student).unlink()
    elif isinstance(text, str):
        Path(student).write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        compare(write_result(tmp_path, "teacher"), student)
    assert student in str(caught.value) and "\n" not in str(caught.value)
