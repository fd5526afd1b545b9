"""scripts/doctor.py: what it says of a machine, which faults it finds, and that one fault costs no other finding."""

import dataclasses
import errno
import fcntl
import functools
import importlib
import json
import shutil
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megahedge.config.options import Stage1Options
from megahedge.data.indexed_writer import IndexedDatasetWriter
from megahedge.data.meta import DatasetMeta, tokenizer_digest, write_meta
from megahedge.data.tokenizer import load_tokenizer
from megahedge.doctor import backends, disk, report, software
from megahedge.doctor import doctor as doctor_module
from megahedge.kernels.problem import Backend
from megahedge.kernels.registry import BACKENDS
from megahedge.training import distributed
from megahedge.training.meeting import roll_call, time_all_reduces
from megahedge.training.run_folder import RunFolder
from megahedge.utils.errors import InputError, RunError
from megahedge.utils.files import file_lock, lock_fault
from megahedge.utils.packages import Broken, import_fault
from tests.distributed import run_distributed
from tests.training.processes import Command

REPOSITORY = Path(__file__).parents[1]
SCRIPT = REPOSITORY / "scripts" / "doctor.py"
TEACHER = str(REPOSITORY / "scripts" / "quickstart" / "teacher")
FEW = {name: name.replace("-", "_") for name in ("torch", "broken-wheel", "crashing-wheel", "sound-wheel", "absent")}
"""Stands in for the packages whose import takes seconds."""
WHEELS = {
    "broken-wheel": "raise ImportError('undefined symbol: _ZN3c10\\nin libc10.so')",
    "crashing-wheel": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
    "sound-wheel": "print('noise')",
}


@pytest.fixture(autouse=True)
def few_packages(tmp_path, monkeypatch):
    """Three fake packages in place of the real ones, and no network."""
    folder = tmp_path / "wheels"
    for package, code in WHEELS.items():
        module = folder / package.replace("-", "_")
        module.mkdir(parents=True)
        (module / "__init__.py").write_text(code)
        metadata = folder / f"{module.name}-1.2.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(doctor_module, "PackageTrial", functools.partial(software.PackageTrial, FEW))
    monkeypatch.setattr(disk.huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def examine(tmp_path, monkeypatch, capsys):
    """A function from options to exit status, printed lines and what --json has written."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.chdir(REPOSITORY)
    for name in distributed.LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    script, path = importlib.import_module("doctor"), tmp_path / "report.json"

    def run(*words):
        for name in distributed.LAUNCHER_VARIABLES:  # which an earlier call has set
            monkeypatch.delenv(name, raising=False)
        options = ["--output_dir", str(tmp_path / "run"), "--seq_len", "16", "--dtype", "fp32", "--json", str(path)]
        monkeypatch.setattr(sys, "argv", ["doctor.py", *options, *map(str, words)])
        status = script.main()
        return status, capsys.readouterr().out.splitlines(), json.loads(path.read_text())

    return run


def write_data(prefix, eod: bool = True, digest: str | None = None) -> Path:
    """Both splits of a dataset made with the carried teacher's tokenizer, or one of another digest."""
    tokenizer = load_tokenizer(TEACHER)
    for split in ("train", "val"):
        with IndexedDatasetWriter(f"{prefix}_{split}", np.uint16) as writer:
            for number in range(4):
                writer.add_document([*range(100, 120 + number), tokenizer.eos_token_id if eod else 7])
            writer.finish()
    write_meta(prefix, DatasetMeta(digest or tokenizer_digest(tokenizer), "some/tokenizer", 2048, tokenizer.eos_token_id, {}))
    return prefix


def rows(found: dict, title: str) -> dict[str, str]:
    """Texts by label of the section whose title begins so."""
    (section,) = (section for section in found["sections"] if section["title"].startswith(title))
    return {row["label"]: row["text"] for row in section["rows"]}


# ---- the whole report -------------------------------------------------------------------------------------------------------------


def test_a_sound_machine_is_fit_and_the_json_says_what_is_printed(examine, tmp_path):
    status, printed, found = examine("--data_path", write_data(tmp_path / "data"), "--teacher", TEACHER)
    assert printed == report.lines(found) and status == 0 and found["fit"] and found["problems"] == []
    assert "fit for training, 2 warnings" in printed  # the wheels
    titles = [section["title"].split()[0] for section in found["sections"]]
    assert titles == ["software", "hardware", "ranks", "backends", "teacher", "data", "memory", "disk", "network"]
    assert rows(found, "software")["torch"].startswith(torch.__version__)
    assert rows(found, "teacher")["weights"] == "all 52 tensors are there"
    assert "4 documents" in rows(found, "data")["validation"]
    assert rows(found, "disk")["file locks"] == "work, on this node"
    assert "HF_HUB_OFFLINE" in rows(found, "network")["Hugging Face hub"]
    assert rows(found, "memory")["stage 2"].endswith("at the fullest moment")
    assert not (tmp_path / "run").exists()


def test_without_options_what_needs_them_is_left_out_with_the_reason(examine):
    status, _, found = examine()
    assert status == 0
    assert "--teacher" in rows(found, "teacher")["teacher"] and "--data_path" in rows(found, "data")["data"]
    assert rows(found, "memory")["plan"] == "needs a --teacher"


def test_bad_options_are_refused_in_one_line(examine, tmp_path):
    for words, said in (
        (["--dtype", "fp8"], "--dtype=fp8"),
        (["--recipe", "none"], "--recipe=none"),
        (["--json", str(tmp_path)], f"--json={tmp_path}"),
        (["--teacher_revision", "main"], "--teacher_revision=main goes with --teacher"),
        (["--mixer", "mamba"], "--mixer"),
    ):
        with pytest.raises(InputError, match=said):
            examine(*words)


# ---- packages ---------------------------------------------------------------------------------------------------------------------


def test_broken_packages_are_named_with_their_reason_and_stop_nothing(examine):
    _, _, found = examine()
    said = rows(found, "software")
    assert said["broken-wheel"] == "1.2 broken: ImportError: undefined symbol: _ZN3c10 in libc10.so"
    assert said["crashing-wheel"] == "1.2 broken: its import ends the process (signal 11)"
    assert said["sound-wheel"] == "1.2" and said["absent"] == "not installed"
    assert [text.split()[0] for text in found["warnings"]] == ["broken-wheel", "crashing-wheel"]


def test_an_import_that_does_not_end_is_given_up(tmp_path):
    (tmp_path / "wheels" / "sound_wheel" / "__init__.py").write_text("import time\ntime.sleep(60)")
    trial = software.PackageTrial({"sound-wheel": "sound_wheel", "absent": "absent"}, seconds=5)
    assert trial.outcome()["sound-wheel"]["fault"] == "its import does not end within 5 s"


def test_where_megahedge_cannot_be_imported_the_packages_are_told_of(examine, monkeypatch):
    monkeypatch.setitem(sys.modules, "megahedge.doctor.doctor", None)
    monkeypatch.setattr("megahedge.doctor.without_packages.PackageTrial", functools.partial(software.PackageTrial, FEW))
    status, printed, found = examine()
    assert status == 1 and printed == report.lines(found)
    assert rows(found, "software")["broken-wheel"].startswith("1.2 broken")
    assert "megahedge cannot be imported (ModuleNotFoundError" in found["problems"][0]


# ---- backends ---------------------------------------------------------------------------------------------------------------------


def test_each_structure_has_the_backend_that_auto_takes_and_the_others_their_reasons():
    section = report.Section("backends")
    backends.look_at_backends(section, head_dim=32)
    chosen, said = section.figures["scan"]["chosen"], dict(section.rows)
    assert set(chosen.values()) <= set(BACKENDS) and all(said[label] == name for label, name in chosen.items())
    assert chosen["decay by head, step by head"] == "chunked"
    assert said["not chunked"] == "its decay differs between the channels of V"  # the same for all rows: said once, without rows
    assert said["not reference"] == "could, and a faster one does"


def test_a_new_backend_shows_up_by_itself_and_a_broken_one_is_warned_of(monkeypatch):
    reason = Broken("triton cannot be imported (ImportError: libcuda.so.1)")
    new = {"new": Backend("new", lambda problem: reason, None), **BACKENDS}
    monkeypatch.setattr(backends, "BACKENDS", new)
    section = report.Section("backends")
    backends.look_at_backends(section, head_dim=32)
    assert dict(section.rows)["not new"] == reason
    assert section.warnings == [f"the faster scan backend new is left out: {reason}"]


def test_a_missing_package_is_no_broken_one():
    assert type(import_fault("no-such-package", ImportError("gone"))) is str
    assert isinstance(import_fault("torch", ImportError("undefined\nsymbol")), Broken)
    assert "\n" not in import_fault("torch", ImportError("undefined\nsymbol"))


# ---- teacher and data -------------------------------------------------------------------------------------------------------------


def test_data_of_another_tokenizer_is_a_problem_told_once(examine, tmp_path):
    status, _, found = examine("--data_path", write_data(tmp_path / "data", digest="0" * 64), "--teacher", TEACHER)
    assert status == 1 and len(found["problems"]) == 1  # both splits have one meta.json
    assert "made with tokenizer some/tokenizer" in found["problems"][0] and "preprocess the text again" in found["problems"][0]


def test_missing_data_and_a_missing_teacher_stop_nothing_else(examine, tmp_path):
    status, _, found = examine("--data_path", tmp_path / "nowhere", "--teacher", "no/such-teacher")
    assert status == 1
    assert sum("no dataset at --data_path" in text and "tools/preprocess_owt.py" in text for text in found["problems"]) == 1
    assert any("no/such-teacher is not on this machine" in text and "tools/download.py" in text for text in found["problems"])
    assert "free there" in rows(found, "disk") and "torch" in rows(found, "software")


def test_data_that_no_document_ends_in_is_warned_of(examine, tmp_path):
    _, _, found = examine("--data_path", write_data(tmp_path / "data", eod=False), "--teacher", TEACHER, "--seq_len", 200)
    assert sum("no token looked at ends a document" in text for text in found["warnings"]) == 2
    assert sum("a sample takes 201" in text for text in found["problems"]) == 2


def test_a_damaged_teacher_is_a_problem(examine, tmp_path):
    shutil.copytree(TEACHER, tmp_path / "teacher")
    for path in (tmp_path / "teacher").glob("*.safetensors"):
        path.unlink()
    status, _, found = examine("--teacher", tmp_path / "teacher")
    assert status == 1 and any(str(tmp_path / "teacher") in text for text in found["problems"])


def test_sizes_that_do_not_fit_the_job_are_problems(examine):
    status, _, found = examine("--teacher", TEACHER, "--tp_size", 3)
    assert status == 1 and all("--tp_size=3 does not divide" in text for text in found["problems"])


# ---- disk -------------------------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_a_problem(examine, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    status, _, found = examine("--teacher", TEACHER)
    assert status == 1
    assert any("a checkpoint takes" in text and "make room" in text for text in found["problems"])
    assert any("/dev/shm has 1.0 MiB free" in text and "--shm-size" in text for text in found["warnings"])


def test_a_place_that_cannot_be_written_to_is_a_problem(examine, tmp_path):
    (tmp_path / "file").touch()
    status, _, found = examine("--output_dir", tmp_path / "file" / "run")
    assert status == 1 and "cannot be written to" in found["problems"][0] and "name a folder elsewhere" in found["problems"][0]


@pytest.fixture
def no_locks(monkeypatch):
    def flock(handle, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)


def test_a_file_system_without_locks_is_warned_of(examine, no_locks):
    status, _, found = examine()
    assert status == 0 and "do not work" in rows(found, "disk")["file locks"]
    assert any("file locks do not work in" in text and "start one at a time" in text for text in found["warnings"])


def test_a_run_goes_on_without_locks_and_says_so(no_locks, tmp_path, caplog):
    with RunFolder(tmp_path / "run").locked():
        assert (tmp_path / "run").is_dir()
    assert ["file locks do not work in" in text for text in caplog.messages] == [True]


def test_locks_that_keep_nobody_out_are_found(tmp_path, monkeypatch):
    assert lock_fault(tmp_path) is None
    monkeypatch.setattr(fcntl, "flock", lambda handle, operation: None)
    assert lock_fault(tmp_path) == "two processes can hold one lock"
    assert list(tmp_path.glob(".*")) == []
    with file_lock(tmp_path / "lock"):
        pass


# ---- several ranks ----------------------------------------------------------------------------------------------------------------


def _one_comes_late() -> list:
    """Rank 1 joins only after rank 0 has given up."""
    told = ""
    if dist.get_rank() == 0:
        try:
            time_all_reduces(torch.device("cpu"), seconds=0.5)
        except RunError as error:
            told = str(error)
        _get_default_store().set("given up", "")
    else:
        _get_default_store().wait(["given up"])
        dist.all_reduce(torch.ones(1))
    timings = time_all_reduces(torch.device("cpu"), seconds=60)
    return [told, [(timing.num_bytes, timing.seconds > 0) for timing in timings]]


def test_an_all_reduce_that_hangs_is_given_up_and_names_who_is_missing():
    (told, timings), (_, others) = run_distributed(_one_comes_late, 2)
    assert "over 2 ranks has not ended within 0.5 s: rank 1 has not begun it" in told
    assert timings == others == [(4, True), (64 << 20, True)]


def _environment(rank: int, port: int) -> dict[str, str]:
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "HF_HUB_OFFLINE": 1}
    return {name: str(value) for name, value in values.items()}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_ranks_meet_and_add_up(tmp_path):
    """Rank 0 tells of both; rank 1, which sees another folder of data, prints nothing."""
    port, path = _free_port(), tmp_path / "report.json"
    words = [["--data_path", str(write_data(tmp_path / f"data{rank}")), "--json", str(path), "--seq_len", "16"] for rank in range(2)]
    (tmp_path / "data1_train.idx").unlink()
    commands = [Command(words[rank], tmp_path / str(rank), script=SCRIPT, environment=_environment(rank, port)) for rank in range(2)]
    (status, _), (other, quiet) = (command.finish() for command in commands)
    found = json.loads(path.read_text())
    assert (status, other) == (1, 0) and "fit for training" not in quiet, quiet
    said = rows(found, "ranks")
    assert said["rank 0"] == said["rank 1"] == f"{socket.gethostname()}, cpu"
    assert said["all-reduce, 4 bytes"].startswith("right sum") and "GB/s" in said["all-reduce, 64.0 MiB"]
    assert found["problems"] == [f"--data_path is not there for rank 1 on {socket.gethostname()}; put it where all nodes see it"]


def test_a_rank_that_does_not_come_is_named(tmp_path, monkeypatch, capsys, examine):
    """The rest of the report is made all the same."""
    monkeypatch.setattr("megahedge.doctor.ranks.roll_call", functools.partial(roll_call, seconds=0.3))
    for name, value in _environment(0, _free_port()).items():
        monkeypatch.setenv(name, value)
    options = doctor_module.DoctorOptions(output_dir=str(tmp_path / "run"), json=str(tmp_path / "report.json"))
    start = time.monotonic()
    assert doctor_module.doctor(options) == 1 and time.monotonic() - start < 120
    found = json.loads((tmp_path / "report.json").read_text())
    assert "rank 1 has not come to 127.0.0.1" in found["problems"][0] and "torch" in rows(found, "software")


def test_a_stage_warns_of_too_little_shared_memory(monkeypatch):
    monkeypatch.setattr(distributed, "free_bytes", lambda path: 64 << 20)
    assert "8 processes on one machine want 536.0 MiB" in distributed.missing_shared_memory(8)
    monkeypatch.setattr(distributed, "free_bytes", lambda path: 1 << 40)
    assert distributed.missing_shared_memory(8) is None


def test_the_options_are_those_of_the_stages():
    ours = {field.name for field in dataclasses.fields(doctor_module.DoctorOptions)}
    assert ours - {"json"} <= {field.name for field in dataclasses.fields(Stage1Options)}
