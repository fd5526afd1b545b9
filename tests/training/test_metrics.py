"""metrics.jsonl over kills, restarts and values that are no numbers."""

import json

from megahedge.training import metrics
from megahedge.training.metrics import MetricsLog, read_metrics


def write(path, resumed_step, steps):
    log = MetricsLog(path, resumed_step)
    for step in steps:
        log.write("train", step, {"loss": 1.0 / (step + 1)})
    log.close()


def test_lines_after_the_resumed_step_are_written_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 0, range(1, 6))
    write(path, 3, [4, 5])
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4, 5]


def test_a_run_that_starts_over_starts_the_file_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 0, [0, 1])
    write(path, 0, [0, 1])
    assert [line["step"] for line in read_metrics(path)] == [0, 1]


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 0, [1, 2])
    with open(path, "a") as handle:
        handle.write('{"kind": "train", "st')
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    write(path, 2, [3])
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_values_that_json_does_not_know_are_null(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", 0)
    log.write("train", 1, {"loss": float("nan"), "grad_norm": float("inf"), "lr": 0.5, "skipped": 1})
    log.close()

    def refuse(constant):
        raise AssertionError(constant)

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line == {"kind": "train", "step": 1, "loss": None, "grad_norm": None, "lr": 0.5, "skipped": 1}


def test_a_full_disk_ends_the_file_and_not_the_run(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(metrics.logger, "error", lambda text, *values: said.append(text % values))
    log = MetricsLog(tmp_path / "metrics.jsonl", 0)
    log.write("train", 1, {"loss": 1.0})
    log._handle = open("/dev/full", "w")  # noqa: SIM115
    for step in (2, 3):
        log.write("train", step, {"loss": 1.0})
    log.close()
    (line,) = said
    assert "metrics.jsonl can no longer be written" in line and "No space left" in line
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_an_evaluation_that_is_due_again_replaces_what_a_killed_start_wrote_of_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    for kind, step in [("eval", 0), ("train", 1), ("train", 2), ("eval", 2), ("train", 3)]:
        log.write(kind, step, {})
    log.close()

    def kept(resumed_step, evaluation_due):
        MetricsLog(path, resumed_step, evaluation_due).close()
        return [(line["kind"], line["step"]) for line in read_metrics(path)]

    assert kept(2, False) == [("eval", 0), ("train", 1), ("train", 2), ("eval", 2)]
    assert kept(2, True) == [("eval", 0), ("train", 1), ("train", 2)]


def test_no_file_is_no_lines(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_lines_that_something_has_damaged_are_left_out_with_a_warning(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    damaged = ["garbage", "[3]", '{"kind": "train", "step": "x"}', '{"kind": "train", "step": null}']
    sound = ['{"kind": "train", "step": 1, "loss": 1.0}', '{"kind": "train", "step": 2, "loss": 0.5}']
    path.write_text("\n".join([sound[0], *damaged, sound[1], ""]))
    MetricsLog(path, resumed_step=2).close()
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    assert "4 lines cannot be read" in caplog.text
