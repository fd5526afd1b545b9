"""Commands that are run once, gone on with where they were stopped, and named where they fail."""

import dataclasses
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megahedge.utils.errors import InputError, RunError
from megahedge.utils.jobs import Job, run_jobs

SCRIPT = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--output_dir") + 1])
folder.mkdir(exist_ok=True)
(folder / "run.json").write_text("{}")
with (folder / "starts").open("a") as handle:
    handle.write(" ".join(sys.argv[3:]) + "\\n")
if "--fail" in sys.argv and "--resume" not in sys.argv:
    sys.exit("error: out of luck")
(folder / "summary.json").write_text(json.dumps({"validation_loss": 2.0}))
"""


@pytest.fixture
def job(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    return lambda name, **options: Job(tmp_path / "script.py", options, tmp_path / "runs" / name)


def starts(job: Job) -> list[str]:
    return (job.folder / "starts").read_text().splitlines()


def test_options_become_words(job):
    words = job("a", lr=0.1, gate=False, fail=True, data_path=("x", "y"), teacher=None).command()
    assert words[0] == sys.executable
    assert words[4:] == ["--lr", "0.1", "--no_gate", "--fail", "--data_path", "x", "y"]


def test_a_finished_job_is_not_run_again(job):
    jobs = [job("a", lr=1), job("b", lr=2)]
    assert run_jobs(jobs, parallel=2) == run_jobs(jobs, parallel=1) == [{"validation_loss": 2.0}] * 2
    assert [starts(one) for one in jobs] == [["--lr 1"], ["--lr 2"]]


def test_a_failed_job_is_told_and_gone_on_with(job):
    failing = job("a", fail=True)
    with pytest.raises(RunError, match="ended with status 1: error: out of luck"):
        run_jobs([failing])
    assert run_jobs([failing]) == [{"validation_loss": 2.0}]
    assert starts(failing) == ["--fail", "--fail --resume"]


def test_a_folder_made_with_other_options_is_not_taken_for_this_one(job):
    run_jobs([job("a", lr=0.1, seq_len=64)])
    with pytest.raises(InputError, match=r"a was made with seq_len 64 \(now 32\); use these again, or another --output_dir"):
        run_jobs([job("b"), job("a", lr=0.1, seq_len=32)])
    assert not job("b").folder.exists()


def test_only_options_of_a_run_that_was_started_bind_the_next(job):
    job("a", lr=0.1).claim()
    one = job("a", lr=0.2)
    one.claim()
    one.beside(".log").write_text("")  # started a moment ago, its folder not made yet
    one.claim()
    with pytest.raises(InputError, match=r"a was made with lr 0\.2 \(now 0\.1\)"):
        job("a", lr=0.1).claim()


def test_a_finished_run_of_unknown_options_is_not_taken_either(job):
    run_jobs([job("a", lr=0.1)])
    job("a").beside(".options.json").unlink()
    with pytest.raises(InputError, match=r"a\.options\.json is missing"):
        run_jobs([job("a", lr=0.1)])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_start_that_ends_early_stops_what_it_runs(job, tmp_path, number):
    """And the next start goes on with it."""
    (tmp_path / "script.py").write_text(
        "import pathlib, signal, sys, time\n"
        "folder = pathlib.Path(sys.argv[sys.argv.index('--output_dir') + 1])\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit((folder / 'stopped').write_text('') and 0))\n"
        "folder.mkdir(); (folder / 'run.json').write_text('{}'); time.sleep(60)\n"
    )
    one = job("a")
    code = "import pathlib, sys; from megahedge.utils.jobs import Job, run_jobs; "
    code += "script, folder = map(pathlib.Path, sys.argv[1:]); run_jobs([Job(script, {}, folder)])"
    start = [sys.executable, "-c", code, str(one.script), str(one.folder)]
    with subprocess.Popen(start, stderr=subprocess.PIPE, text=True) as process:
        wait_for(one.folder / "run.json")
        process.send_signal(number)
        told = process.stderr.read()
    assert number == signal.SIGKILL or "stopped by SIGTERM; what is unfinished goes on at the next start" in told
    wait_for(one.folder / "stopped")
    assert one.command()[-1] == "--resume"


def test_a_signal_at_the_very_start_of_a_run_is_not_lost(job, tmp_path):
    """It may come before the run is known to be there, or before its program has taken over."""
    (tmp_path / "script.py").write_text("import time; time.sleep(60)")
    one, code = job("a"), "import sys; sys.path.insert(0, sys.argv[1]); import slow_start"
    (tmp_path / "slow_start.py").write_text(
        "import os, pathlib, signal, sys, threading, time\n"
        "from megahedge.utils import jobs\n"
        "tie = jobs._tie_to_parent\n"
        "jobs._tie_to_parent = lambda parent: (tie(parent), os.kill(parent, signal.SIGTERM), time.sleep(0.5))\n"  # between fork and exec
        "jobs.run_jobs([jobs.Job(*map(pathlib.Path, sys.argv[2:3]), {}, pathlib.Path(sys.argv[3]))])\n"
    )
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(one.script), str(one.folder)], capture_output=True, text=True, timeout=50
    )
    assert "stopped by SIGTERM" in done.stderr and time.monotonic() - begin < 50


def test_no_job_is_started_after_one_has_failed(job, tmp_path):
    """Though one that was started before it goes on for long."""
    (tmp_path / "script.py").write_text(SCRIPT + "if '--long' in sys.argv:\n    import time; time.sleep(2)\n")
    jobs = [job("a", long=True), job("b", fail=True), job("c"), job("d")]
    with pytest.raises(RunError, match="b ended with status 1: error: out of luck"):
        run_jobs(jobs, parallel=2)
    assert [one.folder.exists() for one in jobs] == [True, True, False, False] and jobs[0].summary() is not None


def wait_for(path: Path, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} has not come"
        time.sleep(0.05)


def test_what_would_start_from_a_diverged_run_counts_as_diverged(job, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.replace("2.0", "None"))
    first = job("a")
    second = dataclasses.replace(job("b"), start=first)
    assert second.summary() is None
    run_jobs([first])
    assert run_jobs([second]) == [{"validation_loss": None, "tokens": 0}] and not second.folder.exists()


def test_a_job_that_ends_without_its_figures_has_failed(job, tmp_path):
    (tmp_path / "script.py").write_text("print('asked to stop')")
    with pytest.raises(RunError, match="status 0: asked to stop"):
        run_jobs([job("a")])
