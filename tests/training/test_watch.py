"""Signals of schedulers and people, ranks that fall silent, and machines whose GPUs torch cannot use."""

import logging
import os
import signal

import pytest
import torch.distributed as dist

from megahedge.training import watch
from megahedge.training.distributed import LAUNCHER_VARIABLES, _own_gpu, check_device, init_distributed
from megahedge.training.signals import StopSignal
from megahedge.utils.errors import InputError
from tests.distributed import run_distributed


@pytest.fixture
def handlers():
    """Puts back what signals did before."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


def test_who_asks_twice_does_not_end_a_rank_that_is_leaving(handlers):
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
    for number in (signal.SIGTERM, signal.SIGUSR1):
        os.kill(os.getpid(), number)  # would end this process
    assert signal.getsignal(signal.SIGINT) == handlers[signal.SIGINT]


def test_without_a_request_signals_do_again_what_they_did(handlers):
    with StopSignal() as stop:
        pass
    assert not stop.requested
    assert {number: signal.getsignal(number) for number in handlers} == handlers


def test_a_first_interrupt_asks_and_a_second_one_ends(handlers, capfd):
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        assert "asked to stop: the run ends after its next step, with a checkpoint; Ctrl-C again ends it at once" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def _fall_silent() -> list[str]:
    """What rank 0 says of rank 1, whose signs of life stop and come back."""
    store = dist.distributed_c10d._get_default_store()
    key = f"{watch._SIGN}1"
    if dist.get_rank() == 1:
        for turn in ("spoken", "silent", "back"):
            store.wait([turn])
            if turn != "silent":
                store.set(key, turn)
            store.set(f"{turn} done", "")
        return []
    said = []
    watch.logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: said.append(record.getMessage())
    others = watch._Others(range(1, 2), silence=0.2)

    def look(turn):
        store.set(turn, "")
        store.wait([f"{turn} done"])
        others.look(lambda rank: store.get(key) if store.check([key]) else None)

    look("spoken")
    assert said == []
    watch.time.sleep(0.3)
    look("silent")
    others.look(lambda rank: store.get(key))  # told once
    look("back")
    return said


def test_silent_ranks_are_named_once_and_again_when_they_are_back():
    first, second = run_distributed(_fall_silent, 2)
    assert len(first) == 2 and second == []
    assert first[0].startswith("rank 1 has not been heard of for 0 s, and the others wait: stopped")
    assert first[1] == "rank 1 has been heard of again"


def _watch_each_other() -> bool:
    """Whether both ranks give signs, and the thread ends with its block."""
    store = dist.distributed_c10d._get_default_store()
    with watch.SilenceWatch(interval=0.02):
        for rank in range(2):
            store.wait([f"{watch._SIGN}{rank}"])
        watch.time.sleep(0.2)
        counts = [int(store.get(f"{watch._SIGN}{rank}")) for rank in range(2)]
        dist.barrier()
    return all(count > 2 for count in counts)


def test_every_rank_gives_signs_of_life():
    assert run_distributed(_watch_each_other, 2) == [True, True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "3"}, "RANK=3 of WORLD_SIZE=2; ranks count from 0"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE='x', which is no number"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE='', which is no number"),
        ({"WORLD_SIZE": " "}, "WORLD_SIZE=' ', which is no number; unset it, or start with the deepspeed launcher or torchrun"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0; a job has 1 process or more"),
        ({"RANK": "-1"}, "RANK='-1', which is no number"),
        ({"RANK": "²"}, "RANK='²', which is no number"),
        ({"RANK": "9" * 5000}, "RANK='9999"),
        ({"LOCAL_RANK": "0 "}, "LOCAL_RANK='0 ', which is no number"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999; ports go from 1 to 65535"),
    ],
)
def test_numbers_that_cannot_be_are_refused_before_any_process_waits(monkeypatch, changes, message):
    values = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"} | changes
    for name in LAUNCHER_VARIABLES:
        monkeypatch.setenv(name, values[name])
    with pytest.raises(InputError, match=f"^the environment says {message}"):
        init_distributed(1)


def test_a_rank_takes_its_own_gpu():
    assert [_own_gpu(rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert _own_gpu(3, 1) == 0  # the scheduler shows each task its own alone
    with pytest.raises(InputError, match="LOCAL_RANK=5 has no GPU: 4 are visible"):
        _own_gpu(5, 4)


def test_gpus_that_torch_cannot_use_are_no_reason_to_train_on_processors(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "nvidiactl").touch()
    check_device(tmp_path)  # a driver without a GPU
    (tmp_path / "nvidia0").touch()
    with pytest.raises(InputError, match=r"this machine has GPUs, and torch .* cannot use them: install torch's CUDA build"):
        check_device(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_device(tmp_path)
