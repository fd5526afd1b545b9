"""scripts/sweep_lr.py: a table of rates, whatever became of their runs."""

import dataclasses
import importlib
from pathlib import Path

import pytest

from megahedge.utils.errors import InputError


@pytest.fixture
def sweeps(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "scripts")
    return importlib.import_module("sweep_lr")


@pytest.fixture
def options(sweeps, tmp_path):
    """A function that makes options for runs with given contents of the YAML file."""

    def make(text="seq_len: 64", **changes):
        (tmp_path / "options.yaml").write_text(text)
        places = {"options": str(tmp_path / "options.yaml"), "output_dir": str(tmp_path / "runs")}
        return sweeps.SweepOptions(**places | {"stage": "stage2", "lr": (1e-4, 1.0)} | changes)

    return make


def test_a_rate_that_diverges_is_a_row_and_the_best_comes_first(sweeps, options, monkeypatch):
    losses = {"lr-0.0001-new-0.01": 3.5, "lr-0.0001-new-0.1": 3.0, "lr-1-new-0.01": None, "lr-1-new-0.1": None}
    monkeypatch.setattr(sweeps, "run_jobs", lambda jobs, parallel: [{"validation_loss": losses[job.folder.name]} for job in jobs])
    rows = [line.split() for line in sweeps.sweep(options(lr_new=(1e-2, 0.1))).splitlines()[1:]]
    assert rows[:2] == [["0.0001", "0.1", "3.0000"], ["0.0001", "0.01", "3.5000"]]
    assert sorted(rows[2:]) == [["1", "0.01", "diverged"], ["1", "0.1", "diverged"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("output_dir: elsewhere", "names output_dir, which the sweep sets itself"),
        ("lr: 1.0\ntrain_tokens: 5", "names lr, train_tokens, which"),
        ("[", "--options=.* cannot be read"),
        ("- a", "must hold options by name"),
    ],
)
def test_an_options_file_that_will_not_do_is_refused_before_a_run(sweeps, options, text, message):
    with pytest.raises(InputError, match=message):
        sweeps.sweep(options(text))


def test_a_missing_options_file_is_refused(sweeps, options, tmp_path):
    with pytest.raises(InputError, match=r"--options=.*nowhere\.yaml cannot be read"):
        sweeps.sweep(dataclasses.replace(options(), options=str(tmp_path / "nowhere.yaml")))
