"""A lock that a killed build has left does not stop later starts."""

import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time

import pytest

from megahedge.training.op_builds import await_op_builds, prepare_op_builds


@pytest.fixture
def lock(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    path = tmp_path / "py_cpu" / "some_op" / "lock"
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def make_old(path):
    os.utime(path, (time.time() - 1000, time.time() - 1000))


def test_an_old_lock_that_nobody_holds_is_removed(lock, caplog):
    make_old(lock)
    await_op_builds()
    assert not lock.exists()
    assert "left behind by a killed process" in caplog.text


def test_an_old_lock_that_a_process_holds_is_waited_for(lock):
    holding = "import sys, time; handle = open(sys.argv[1]); print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", holding, str(lock)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        make_old(lock)
        waiting = threading.Thread(target=await_op_builds, daemon=True)
        waiting.start()
        waiting.join(1.0)
        assert waiting.is_alive() and lock.exists()
        holder.kill()
    waiting.join(20.0)
    assert not waiting.is_alive() and not lock.exists()


def test_a_young_lock_is_waited_for_until_it_goes(lock):
    waiting = threading.Thread(target=await_op_builds, daemon=True)
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive() and lock.exists()
    lock.unlink()
    waiting.join(20.0)
    assert not waiting.is_alive()


def test_the_ninja_of_the_environment_is_taken_though_it_is_not_activated(tmp_path, monkeypatch):
    """Another version of ninja would compile again what is compiled."""
    other = tmp_path / "ninja"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for _ in range(2):
        prepare_op_builds()
        scripts = sysconfig.get_path("scripts")
        assert os.environ["PATH"] == f"{scripts}{os.pathsep}{tmp_path}"
        assert shutil.which("ninja") == f"{scripts}/ninja"
