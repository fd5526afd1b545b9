"""scripts/compare_recipes.py: the best rate of each recipe by the first seed, and a table whatever became of the runs."""

import importlib
from pathlib import Path

import pytest

from megahedge.utils.files import read_json, write_json


@pytest.fixture
def compare(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "scripts")
    return importlib.import_module("compare_recipes")


@pytest.fixture
def comparison(compare, monkeypatch, tmp_path):
    """A function from a made-up loss of each run, by its name, to the rows by model and the names of the runs; the teacher's loss is 3."""

    def make(loss) -> tuple[dict, list[str]]:
        asked = []

        def run_jobs(jobs, parallel):
            asked.extend(job.folder.name for job in jobs)
            return [{"validation_loss": loss(job.folder.name)} for job in jobs]

        monkeypatch.setattr(compare, "run_jobs", run_jobs)
        monkeypatch.setattr(compare.Comparison, "_teacher_loss", lambda self: 3.0)
        options = compare.CompareOptions(teacher="t", data_path="d", output_dir=str(tmp_path), lr=(5e-4, 1e-3, 2e-3), tuned_lr=(1e-3,))
        return {row["model"]: row for row in compare.Comparison(options).run()}, asked

    return make


def test_the_best_rate_is_chosen_by_the_first_seed_and_what_is_recovered_is_told(compare, comparison):
    """Stage 1 at 5; `paper` best at the middle rate for seed 1, though not for seed 2."""

    def loss(name: str) -> float:
        if name.startswith("stage1"):
            return 5.0
        at_middle = "lr0.001" in name
        return 4.0 - 0.5 * at_middle if "seed1" in name else 3.5 + at_middle

    rows, asked = comparison(loss)
    assert list(rows)[:3] == ["teacher", "stage 1, paper", "stage 1, tuned"]
    assert rows["paper"]["lr"] == 1e-3
    assert rows["paper"]["losses"] == [3.5, 4.5]
    assert rows["paper"]["recovered"] == pytest.approx((5 - 4) / (5 - 3))
    assert {"hedgehog", "tuned", "hedgehog, no stage 1", "paper, no stage 1", "tuned, no stage 1"} <= set(rows)
    assert "paper-lr0.0005-seed2" not in asked and "paper-lr0.001-seed2" in asked
    assert "recovered" in compare.table(list(rows.values())).splitlines()[0]


def test_runs_that_diverged_are_told_in_table_and_json(compare, comparison, tmp_path):
    """`paper` after stage 1 at the highest rate, and at its best for the second seed; all of `tuned` after stage 1; stage 1 of `tuned`."""

    def loss(name: str) -> float | None:
        if name in ("stage1-tuned-seed2", "paper-lr0.002-seed1", "paper-lr0.001-seed2") or name.startswith("tuned-lr"):
            return None
        return 3.5 if "lr0.001" in name else 4.0

    rows, _ = comparison(loss)
    assert (rows["paper"]["lr"], rows["paper"]["losses"]) == (1e-3, [3.5, None])
    assert rows["paper"]["tried"] == {"0.0005": 4.0, "0.001": 3.5, "0.002": None}
    for model in ("paper", "tuned", "stage 1, tuned"):
        assert (rows[model]["loss"], rows[model]["spread"], rows[model]["perplexity"]) == (None, None, None)
    assert rows["hedgehog"]["recovered"] == 0.5  # of what lies between 4 and 3
    assert rows["paper"]["recovered"] is None and rows["tuned, no stage 1"]["recovered"] is None
    lines = {line[:24].strip(): line[24:].split() for line in compare.table(list(rows.values())).splitlines()}
    assert lines["paper"] == ["0.001", "diverged", "-", "-", "-"]
    assert lines["tuned, no stage 1"] == ["0.001", "3.5000", "0.0000", "33.115", "-"]
    write_json(tmp_path / "rows.json", list(rows.values()))
    assert read_json(tmp_path / "rows.json") == list(rows.values())
