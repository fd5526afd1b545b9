"""scripts/reproduce.py: a table from its rows to its files, and the commands at the paper's size."""

import dataclasses
import importlib
import shlex
from pathlib import Path

import pytest

from megahedge.utils.errors import InputError
from megahedge.utils.files import read_json, write_json

ROOT = Path(__file__).parents[1]
COMMAND = "python scripts/reproduce.py TABLE"


@pytest.fixture
def reproduce(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("reproduce")


@pytest.fixture
def finished(reproduce, monkeypatch):
    """A function that runs a table with made-up losses, by the name of the run; the teacher's is 3.  Returns the names of all runs."""

    def make(options, loss) -> tuple[str, list[str]]:
        asked = []

        def run_jobs(jobs, parallel):
            for job in jobs:
                asked.append(job.folder.name)
                if job.summary() is not None:
                    continue
                job.claim()
                job.folder.mkdir(parents=True, exist_ok=True)
                value = loss(job.folder.name)
                write_json(job.folder / "summary.json", {"validation_loss": value, "tokens": job.options["train_tokens"]})
                (job.folder / "metrics.jsonl").write_text('{"kind": "eval", "step": 5, "perplexity": 20.0}\n')

        monkeypatch.setattr(reproduce, "run_jobs", run_jobs)
        monkeypatch.setattr(reproduce.Reproduction, "_check_inputs", lambda self: None)
        monkeypatch.setattr(reproduce.Reproduction, "teacher_loss", lambda self, teacher: 3.0)
        reproduction = reproduce.Reproduction(options)
        return reproduce.write(reproduction, reproduction.run(), COMMAND), asked

    return make


def test_a_table_runs_shared_first_stages_once_and_before_what_starts_from_them(reproduce, finished, tmp_path):
    options = reproduce.ReproduceOptions(table="table2", output_dir=str(tmp_path))
    text, asked = finished(options, lambda name: 3.5 if "gate" in name else 3.8)
    assert [name for name in asked if name.startswith("stage1")] == [f"stage1-pythia-1b-paper-0.2499M-seed{seed}" for seed in (1, 2)]
    assert asked[:2] == [name for name in asked if name.startswith("stage1")] and len(asked) == len(set(asked)) == 2 + 2 * 8
    assert "| gate alone, 50/50 \\* | 0.5M | 3.5000 |" in text and "| Hedgehog, 50/50 | 0.5M | 3.8000 |" in text
    assert text == (tmp_path / "small" / "table2.md").read_text()
    record = read_json(tmp_path / "small" / "table2.json")
    assert f"`{COMMAND}`, seeds 1, 2, megahedge " in text and record["command"] == COMMAND
    assert record["options"]["seeds"] == [1, 2] and len(record["rows"]) == 8


def test_curves_count_the_tokens_of_both_stages(reproduce, finished, tmp_path):
    options = reproduce.ReproduceOptions(
        table="table3", output_dir=str(tmp_path), plot=False, rows=("hedgemamba-10-90", "hedgemamba-0-100")
    )
    _, asked = finished(options, lambda name: 3.5)
    curves = read_json(tmp_path / "small" / "table3-part.json")["curves"]
    step = 8 * 256
    stage1_tokens = round(500_000 * 0.1 / step) * step
    assert curves["HedgeMamba, 10/90"] == [[[5 * step, 20.0], [stage1_tokens + 5 * step, 20.0]]] * 2
    assert curves["HedgeMamba, 0/100"] == [[[5 * step, 20.0]]] * 2
    assert len(asked) == 2 + 4


def test_tables_share_the_runs_of_their_common_rows(reproduce, finished, tmp_path):
    """Whichever is made first; with curves or without, a run's options are the same."""
    asked = {
        table: finished(reproduce.ReproduceOptions(table=table, output_dir=str(tmp_path), plot=False), lambda name: 3.5)[1]
        for table in ("table1", "table2", "table3", "table4")
    }
    for row, tables in {"hedgemamba-10-90": ("table1", "table3", "table4"), "hedgehog-50-50": ("table1", "table2")}.items():
        assert all(f"stage2-{row}-seed1" in asked[table] for table in tables)


def commands(reproduce, capsys, monkeypatch, folder: Path, *options: str) -> list[str]:
    """What `--scale paper` prints of table 1 for one seed."""
    arguments = ["reproduce.py", "table1", "--scale", "paper", "--seeds", "1", "--output_dir", str(folder), *options]
    monkeypatch.setattr("sys.argv", arguments)
    reproduce.main()
    return capsys.readouterr().out.splitlines()


def test_the_paper_scale_prints_commands_in_an_order_in_which_they_can_run(reproduce, capsys, monkeypatch, tmp_path):
    lines = [shlex.split(line) for line in commands(reproduce, capsys, monkeypatch, tmp_path) if not line.startswith("#")]
    made = set()
    for words in lines:
        options = dict(zip(words[2::2], words[3::2], strict=False))
        assert words[0] == "deepspeed" and Path(words[1]).name in ("stage1.py", "stage2.py")
        assert options.get("--init_from") is None or options["--init_from"] in made
        made.add(options["--output_dir"])
    assert len(made) == len(lines) == 4 + 7  # stage 1 at 50/50, 10/90, with RoPE before, tuned; seven rows that train


def test_what_has_ended_is_not_asked_for_again_and_the_table_comes_last(reproduce, capsys, monkeypatch, tmp_path):
    printed = commands(reproduce, capsys, monkeypatch, tmp_path)
    arrays = [line for line in printed if "sbatch" in line]
    assert "--array=1,2,3,4,5,6 scripts/slurm/array.sbatch" in arrays[0]  # the naive baselines have no stage 1 to wait for
    assert "--array=1,2,3,4,5 --dependency=afterany:$first scripts/slurm/array.sbatch" in arrays[1]
    files = [tmp_path / "paper" / f"table1-{name}.txt" for name in ("first", "then")]
    before = [file.read_text().splitlines() for file in files]
    assert before == [printed[1:7], printed[9:14]] and "makes the table" in printed[-1]

    def finish(lines):
        for words in map(shlex.split, lines):
            folder = Path(words[words.index("--output_dir") + 1])
            folder.mkdir()
            write_json(folder / "run.json", {})
            write_json(folder / "summary.json", {"validation_loss": 2.7, "tokens": 1000})

    finish([*before[0], before[1][2]])
    printed = commands(reproduce, capsys, monkeypatch, tmp_path)
    assert [line for line in printed if not line.startswith("#")] == [line for line in before[1] if line != before[1][2]]
    assert "--array=1,2,4,5 scripts/slurm/array.sbatch" in "".join(printed)
    assert files[1].read_text().replace(" --resume", "").splitlines() == before[1]  # a task that waits still finds its own line
    finish(line for number, line in enumerate(before[1]) if number != 2)
    monkeypatch.setattr(reproduce.Reproduction, "_check_inputs", lambda self: None)
    monkeypatch.setattr(reproduce.Reproduction, "teacher_loss", lambda self, teacher: 2.6)
    printed = commands(reproduce, capsys, monkeypatch, tmp_path)
    assert any(line.startswith("| HedgeMamba, 10/90 |") for line in printed) and (tmp_path / "paper" / "table1.md").is_file()


def test_runs_of_a_cluster_are_known_by_their_options(reproduce, capsys, monkeypatch, tmp_path):
    commands(reproduce, capsys, monkeypatch, tmp_path, "--data_path", "data/mistaken")
    words = shlex.split(commands(reproduce, capsys, monkeypatch, tmp_path)[1])  # nothing had begun
    folder = Path(words[words.index("--output_dir") + 1])
    folder.mkdir()
    write_json(folder / "run.json", {})
    with pytest.raises(InputError, match=r"was made with data_path data/openwebtext \(now data/other\)"):
        commands(reproduce, capsys, monkeypatch, tmp_path, "--data_path", "data/other")


def test_what_a_table_lacks_is_refused_before_anything_runs(reproduce, tmp_path):
    with pytest.raises(InputError, match=r"--rows: gate-5-5 is none of table1's, which has teacher, .*, and no file of"):
        reproduce.Reproduction(reproduce.ReproduceOptions(table="table1", rows=("gate-5-5",), output_dir=str(tmp_path)))
    with pytest.raises(InputError, match="no dataset at --data_path=nowhere"):
        reproduce.Reproduction(reproduce.ReproduceOptions(table="table1", data_path="nowhere", output_dir=str(tmp_path))).run()
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="needs the teacher pythia-160m; the scale small has pythia-1b"):
        reproduce.Reproduction(reproduce.ReproduceOptions(table="table6", output_dir=str(tmp_path)))
    for options, told in (
        ({"seeds": ()}, "--seeds needs at least one value"),
        ({"seeds": (1, 2, 1)}, "--seeds=1 2 1 names a value twice"),
        ({"seeds": (1, -1)}, "--seeds=-1 must be at least 0"),
        ({"rows": ("teacher", "teacher")}, "--rows=teacher teacher names a row twice"),
        ({"output_dir": " "}, "--output_dir=' ' is empty"),
        ({"output_dir": __file__}, "is not a folder; name a folder elsewhere"),
    ):
        with pytest.raises(InputError, match=told):
            reproduce.ReproduceOptions(table="table1", **options)


def test_a_row_of_another_table_may_be_asked_for(reproduce, finished, tmp_path):
    options = reproduce.ReproduceOptions(table="table1", output_dir=str(tmp_path), rows=("gate-50-50", "naive"))
    text, _ = finished(options, lambda name: 3.5)
    assert "| gate alone, 50/50 \\* |" in text and "| naive Mamba |" in text


def test_a_stage_1_that_diverged_makes_its_rows_diverge_and_no_others(reproduce, finished, tmp_path):
    rows = ("hedgehog-50-50", "hedgemamba-10-90")
    options = reproduce.ReproduceOptions(table="table1", output_dir=str(tmp_path), rows=rows, seeds=(1,))
    text, _ = finished(options, lambda name: None if "0.2499M" in name else 5000.0)
    assert "| Hedgehog, 50/50 | 0.2499M | diverged |" in text
    assert "| HedgeMamba, 10/90 | 0.5M | 5000.0000 |  | inf |" in text
    assert not (tmp_path / "small" / "table1.md").exists()  # that of all rows is another


def test_a_table_is_not_begun_where_one_of_its_runs_was_made_otherwise(reproduce, monkeypatch, tmp_path):
    options = reproduce.ReproduceOptions(table="table1", output_dir=str(tmp_path))
    last = reproduce.Reproduction(options).jobs()[1][-1]
    dataclasses.replace(last, options=last.options | {"lr": 1.0}).claim()
    last.folder.mkdir()
    write_json(last.folder / "run.json", {})
    monkeypatch.setattr(reproduce.Reproduction, "_check_inputs", lambda self: None)
    with pytest.raises(InputError, match=r"was made with lr 1\.0 \(now "):
        reproduce.Reproduction(options).run()
    assert not list(tmp_path.glob("**/*.log"))
