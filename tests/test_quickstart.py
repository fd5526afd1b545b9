"""scripts/quickstart.sh from the prepared environment to the table, and later starts that repeat what has to be repeated, and no more."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
STUDENTS = ["stage1-paper", "stage1-tuned", "hedgehog", "hedgemamba-paper", "hedgemamba-tuned"]


def start(out: Path, repository: Path, *options: str, **environment: str) -> subprocess.CompletedProcess:
    command = ["bash", "scripts/quickstart.sh", *options, str(out)]
    return subprocess.run(command, cwd=repository, env=os.environ | environment, capture_output=True, text=True)


def commands(output: str) -> list[str]:
    """The commands that were shown, by script and what it makes."""
    shown = []
    for line in output.splitlines():
        if line.startswith("$ "):
            words = line.split()
            script = next(word for word in words if word.endswith(".py"))
            made = words[words.index("--output_dir") + 1] if "--output_dir" in words else words[-1]
            named = script in ("scripts/stage1.py", "scripts/stage2.py", "scripts/evaluate.py")
            shown.append(Path(script).stem + (f" {Path(made).stem}" if named else "") + (" --resume" if "--resume" in words else ""))
    return shown


# stands for python and deepspeed: makes, empty, what each command is there to make; a run named $KILLED is broken off
STAND_IN = """#!/bin/bash
if [ "$1" = -c ]; then echo 1; exit; fi
while [ $# -gt 0 ]; do
    case $1 in
        --output_prefix) mkdir -p "$(dirname "$2")"; touch "$2.meta.json" ;;
        --output_dir) mkdir -p "$2"; touch "$2/run.json"; [ "${2##*/}" != "${KILLED:-}" ] || exit 137; touch "$2/summary.json" ;;
        --output) touch "$2" ;;
        tools/convert_to_hf.py) mkdir -p "$3"; touch "$3/config.json" ;;
    esac
    shift
done
"""


@pytest.fixture
def begun(tmp_path):
    """A function that starts quickstart.sh where python and deepspeed are stand-ins; all files that are there are of an hour ago then."""
    for folder in ("scripts/quickstart/teacher", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(REPOSITORY / "scripts/quickstart.sh", tmp_path / "scripts")
    (tmp_path / "scripts/setup_venv.sh").write_text("setup_venv() { :; }")
    for name in ("text.jsonl.gz", "teacher/tokenizer.json", "teacher/model.safetensors"):
        (tmp_path / "scripts/quickstart" / name).touch()
    for name in ("python", "deepspeed"):
        (tmp_path / ".venv/bin" / name).write_text(STAND_IN)
        (tmp_path / ".venv/bin" / name).chmod(0o755)

    def run(*options: str, **environment: str) -> subprocess.CompletedProcess:
        before = time.time() - 3600
        for path in tmp_path.rglob("*"):
            os.utime(path, (before, before))
        return start(tmp_path / "out", tmp_path, *options, **environment)

    return run


LAST = ["generate", "compare_results"]
ALL = [
    "preprocess_owt",
    *(f"stage1 {name}" for name in STUDENTS[:2]),
    *(f"stage2 {name}" for name in STUDENTS[2:]),
    *(f"evaluate {name}" for name in ("teacher", *STUDENTS)),
    "convert_to_hf",
    *LAST,
]


@pytest.mark.parametrize(
    ("removed", "again"),
    [
        ((), []),
        (("results/hedgehog.json",), ["evaluate hedgehog"]),
        (("hedgemamba-hf",), ["convert_to_hf"]),
        (("hedgehog",), ["stage2 hedgehog", "evaluate hedgehog"]),
        (
            ("stage1-tuned",),
            ["stage1 stage1-tuned", "stage2 hedgemamba-tuned", "evaluate stage1-tuned", "evaluate hedgemamba-tuned", "convert_to_hf"],
        ),
        (
            ("hedgemamba-tuned/summary.json",),
            ["stage2 hedgemamba-tuned --resume", "evaluate hedgemamba-tuned", "convert_to_hf"],
        ),
        (("data",), ALL[:-2]),
    ],
)
def test_what_is_gone_is_made_again_with_all_that_comes_from_it(begun, tmp_path, removed, again):
    first = begun()
    assert first.returncode == 0, first.stderr
    assert commands(first.stdout) == ALL
    for name in removed:
        path = tmp_path / "out" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    second = begun()
    assert second.returncode == 0, second.stderr
    assert commands(second.stdout) == [*again, *LAST]


def test_a_run_that_was_broken_off_is_gone_on_with(begun):
    broken = begun(KILLED="hedgehog")
    assert broken.returncode == 137 and commands(broken.stdout)[-1] == "stage2 hedgehog"
    again = begun()
    assert again.returncode == 0, again.stderr
    assert commands(again.stdout) == ["stage2 hedgehog --resume", *ALL[4:]]


def test_runs_of_other_options_are_not_taken_for_these(begun, tmp_path):
    begun()
    other = begun(STAGE2_TOKENS="1M")
    assert (other.returncode, commands(other.stdout)) == (2, [])
    assert other.stderr.startswith(f"error: {tmp_path}/out/hedgehog was made by stage2 from FOLDER/stage1-paper with --recipe paper")
    assert "--train_tokens 300K" in other.stderr and "--train_tokens 1M" in other.stderr and "another FOLDER" in other.stderr
    (tmp_path / "out" / "stage1-paper.options").unlink()
    unknown = begun()
    assert (unknown.returncode, commands(unknown.stdout)) == (2, [])
    assert "holds a run with options that are not known, as" in unknown.stderr


def test_an_unknown_option_is_an_error_and_help_names_the_knobs(begun):
    wrong = begun("--stage2_tokens")
    assert (wrong.returncode, wrong.stdout) == (2, "") and "there is no option --stage2_tokens" in wrong.stderr
    more = begun("one")
    assert more.returncode == 2 and "one FOLDER at most" in more.stderr
    asked = begun("--help")
    assert asked.returncode == 0 and commands(asked.stdout) == []
    assert all(name in asked.stdout for name in ("STAGE1_TOKENS=120K", "STAGE2_TOKENS=300K", "PYTHON", "OMP_NUM_THREADS", "FOLDER"))


@pytest.mark.parametrize("count", ["abc", "-5K", "3 K", "1e", "1.K"])
def test_what_is_no_count_is_told_before_anything_is_installed_or_made(begun, tmp_path, count):
    (tmp_path / "scripts/setup_venv.sh").write_text("setup_venv() { echo installed; }")
    wrong = begun(STAGE2_TOKENS=count)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == f"error: STAGE2_TOKENS={count} is not a count; write it like 300K or 1.5M\n"


def test_a_folder_is_named_from_where_the_command_is_given(begun, tmp_path):
    """Without one it lies in the repository."""
    (tmp_path / "elsewhere").mkdir()
    for words in (["out"], []):
        command = ["bash", str(tmp_path / "scripts/quickstart.sh"), *words]
        done = subprocess.run(command, cwd=tmp_path / "elsewhere", capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    made = [path.parent.parent.relative_to(tmp_path) for path in tmp_path.rglob("small.meta.json")]
    assert sorted(map(str, made)) == ["elsewhere/out", "runs/quickstart"]


def quickstart(out: Path) -> str:
    shown = start(out, REPOSITORY, STAGE1_TOKENS="4K", STAGE2_TOKENS="4K")
    assert shown.returncode == 0, shown.stdout[-3000:] + shown.stderr[-3000:]
    return shown.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)  # a score of commands, each of which imports torch
@pytest.mark.skipif(not (REPOSITORY / ".venv/bin/deepspeed").exists(), reason="quickstart.sh would install into .venv, which is not there")
def test_quickstart_ends_with_a_table_and_a_model_and_is_not_repeated(tmp_path):
    shown = quickstart(tmp_path)
    lines = shown.splitlines()
    header = next(number for number, line in enumerate(lines) if line.endswith("× teacher"))
    table = lines[header + 1 : header + 7]
    assert [line.split()[0] for line in table] == ["teacher", *STUDENTS]
    assert float(table[0].split()[-1]) == 1.0 and all(float(line.split()[-1]) > 1 for line in table[1:])
    assert json.loads((tmp_path / "hedgemamba-hf" / "config.json").read_text())["model_type"] == "hedge_mamba"
    assert "The harbour was" in shown

    (tmp_path / "results" / "hedgehog.json").unlink()
    assert commands(quickstart(tmp_path)) == ["evaluate hedgehog", *LAST]
