"""`tools/pretrain_teacher.py` under bad input: exit status 2, one line that says what is wrong, nothing written."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megahedge.checkpoint.store import complete_checkpoints
from megahedge.config.options import PretrainOptions
from megahedge.data.tokenizer import load_tokenizer
from megahedge.models.hf_weights import load_config_file
from megahedge.stages.base import plan_run
from megahedge.training.distributed import LAUNCHER_VARIABLES
from tests.training.processes import SCRIPT, STAGE1, STAGE2, start
from tests.training.runs import MODEL, REPOSITORY, command_line, ds_config, make_tokenizer


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file below a folder."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def refused(inputs, tmp_path):
    """A function that starts the command, checks that it ends as one for bad input does, and returns its line on stderr."""

    def check(options: dict, **changes) -> str:
        output = Path(options["output_dir"])
        before = snapshot(inputs), snapshot(output)
        status, stderr = start(options, tmp_path / "process", **changes).finish()
        assert status == 2, stderr
        (line,) = stderr.splitlines()
        assert line.startswith(("error: ", "[rank "))
        assert (snapshot(inputs), snapshot(output)) == before
        return line

    return check


BAD_OPTIONS = [
    ({"data_path": ("nowhere/text",)}, ["nowhere/text", "tools/preprocess_owt.py"]),
    ({"model_config": "nowhere.json"}, ["--model_config=nowhere.json"]),
    ({"init_from": "some/model"}, ["--model_config=", "--init_from=some/model", "give --model_config for a fresh model"]),
    ({"model_config": None}, ["neither --model_config nor --init_from is given"]),
    ({"model_config": None, "init_from": "/nowhere/model"}, ["'/nowhere/model'", "no local folder"]),
    ({"tokenizer": "/nowhere/tokenizer"}, ["/nowhere/tokenizer"]),  # absolute, so that no hub is asked
    ({"ds_config": "nowhere.json"}, ["--ds_config=nowhere.json"]),
    ({"train_tokens": 0}, ["--train_tokens=0"]),
    ({"train_tokens": -1000}, ["--train_tokens=-1000"]),
    ({"train_tokens": 255}, ["--train_tokens=255", "256"]),
    ({"global_batch_size": 0}, ["--global_batch_size=0"]),
    ({"seq_len": 128}, ["--seq_len=128", "max_position_embeddings=64"]),
    ({"micro_batch_size": 3}, ["--micro_batch_size=3", "1, 2, 4 or 8"]),
    ({"tp_size": 3}, ["--tp_size=3", "num_heads=2", "1 or 2"]),
    ({"tp_size": 2}, ["--tp_size=2", "number of processes 1"]),
    ({"dtype": "fp16"}, ["--dtype=fp16", "bf16 or fp32"]),
    ({"train_token": 100}, ["train_token"]),
    ({"adam_eps": 0}, ["--adam_eps=0"]),
    ({"lr": 3e38}, ["--lr=3e+38", "at most 1e+06"]),
    ({"output_dir": f"{__file__}/run"}, [f"--output_dir={__file__}/run cannot be made: {__file__} is a file"]),
    ({"lr": "fast"}, ["--lr=fast is not a finite number"]),
]


@pytest.mark.parametrize(("changes", "said"), BAD_OPTIONS, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_bad_options_are_refused(changes, said, options, refused):
    line = refused(options(**changes))
    assert all(word in line for word in said), line


def test_a_dp_size_that_does_not_divide_the_batch_is_refused_before_any_process_waits(options, refused):
    line = refused(options(), environment={"WORLD_SIZE": "3", "RANK": "2"})
    assert line.startswith("[rank 2] error: dp_size=3 does not divide --global_batch_size=8; a dp_size of 1, 2, 4 or 8 does")


@pytest.mark.parametrize(
    ("script", "words", "name", "value"),
    [
        (SCRIPT, ["--model_config", "nowhere.json"], "WORLD_SIZE", ""),
        (STAGE1, ["--teacher", "/nowhere"], "RANK", "²"),
        (STAGE2, ["--teacher", "/nowhere", "--stage1_steps", "0", "--dry_run"], "WORLD_SIZE", " "),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else None,
)
def test_a_launchers_number_that_is_none_is_named_before_anything_else(script, words, name, value):
    """In a fresh interpreter: the log asks for the numbers as soon as it is imported."""
    environment = {other: text for other, text in os.environ.items() if other not in LAUNCHER_VARIABLES} | {name: value}
    ended = subprocess.run([sys.executable, script, *words], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120)
    said = f"error: the environment says {name}={value!r}, which is no number; unset it, or start with the deepspeed launcher or torchrun\n"
    assert (ended.returncode, ended.stderr) == (2, said)


def test_data_of_another_tokenizer_is_refused(options, refused, tmp_path):
    make_tokenizer(tmp_path / "other", 96)
    assert "preprocess the text again" in refused(options(tokenizer=str(tmp_path / "other")))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "damaged"),
        (json.dumps(MODEL | {"model_type": "llama"}), "llama"),
        (json.dumps(MODEL | {"vocab_size": 50}), "vocab_size=50"),
        (json.dumps(MODEL | {"num_attention_heads": 3}), "num_heads=3"),
        (json.dumps(MODEL | {"hidden_size": True}), "hidden_size=True must be a whole number"),
        (json.dumps(MODEL | {"rotary_pct": "a"}), "rotary_pct='a' must be a finite number"),
        (json.dumps(MODEL | {"rope_parameters": "x"}), "rope_parameters='x' must be an object"),
        (json.dumps(MODEL | {"layer_norm_eps": -1}), "norm_eps=-1"),
        (json.dumps(MODEL | {"initializer_range": -1}), "initializer_range=-1"),
        (json.dumps(MODEL | {"use_parallel_residual": "no"}), "parallel_residual='no' must be true or false"),
        (json.dumps({"model_type": "gpt_neox"}), "vocab_size"),
    ],
)
def test_a_model_that_cannot_be_is_refused(config, said, options, refused, tmp_path):
    (tmp_path / "config.json").write_text(config)
    assert said in refused(options(model_config=str(tmp_path / "config.json")))


def test_a_ds_config_that_sets_what_options_own_is_refused(options, refused, tmp_path):
    (tmp_path / "ds.json").write_text('{"train_batch_size": 64}')
    assert "--global_batch_size" in refused(options(ds_config=str(tmp_path / "ds.json")))


@pytest.fixture
def run(options, made):
    """Options whose output_dir is a copy of a finished run."""
    values = options()
    shutil.copytree(made("zero1"), values["output_dir"])
    return values


def test_a_run_is_not_written_over(run, refused):
    line = refused(run)
    assert "step-00000020" in line and "--resume" in line


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lr": 1e-3}, "--lr 0.005 (now 0.001)"),
        ({"seed": 8}, "--seed 7 (now 8)"),
        ({"global_batch_size": 4}, "--global_batch_size 8 (now 4)"),
    ],
)
def test_a_run_is_not_resumed_as_another(changes, said, run, refused):
    assert said in refused(run | {"resume": True} | changes)


def test_a_run_is_not_resumed_on_other_data(run, inputs, tmp_path):
    """A corpus with one other token, whose index is the same."""
    other = tmp_path / "inputs"
    shutil.copytree(inputs, other, ignore=lambda folder, names: [name for name in names if not name.startswith(("data", "model", "tok"))])
    corpus = other / "data_train.bin"
    tokens = bytearray(corpus.read_bytes())
    tokens[0] ^= 1
    corpus.write_bytes(tokens)
    status, stderr = start(run | {"resume": True, "data_path": (str(other / "data"),)}, tmp_path / "process").finish()
    assert status == 2
    assert "data.train.0.bin_blocks_sha256 was" in stderr


def test_data_that_names_no_tokenizer_still_pins_the_one_of_the_run(options, inputs, tmp_path):
    """Foreign pairs have no meta.json; --tokenizer may move, so a plan records what the tokenizer is."""
    for part in ("train.bin", "train.idx", "val.bin", "val.idx"):
        shutil.copy(inputs / f"data_{part}", tmp_path / f"foreign_{part}")
    bare = {"data_path": (str(tmp_path / "foreign_train"),), "val_data_path": str(tmp_path / "foreign_val")}
    make_tokenizer(tmp_path / "other", 90)
    model = load_config_file(inputs / "model.json")
    digests = set()
    for folder in (inputs / "tokenizer", tmp_path / "other"):
        chosen = PretrainOptions(**options(**bare))
        digests.add(plan_run(chosen, model, "", load_tokenizer(str(folder)), str(folder)).tokenizer_digest)
    assert len(digests) == 2


def test_a_run_without_a_sound_checkpoint_does_not_start_anew(run, tmp_path):
    for path in complete_checkpoints(Path(run["output_dir"]) / "checkpoints"):
        (path / "optimizer-00000.safetensors").write_bytes(b"")
    before = snapshot(Path(run["output_dir"]))
    status, stderr = start(run | {"resume": True}, tmp_path / "process").finish()
    assert status == 2, stderr
    assert "all 2 checkpoints" in stderr.splitlines()[-1]
    assert snapshot(Path(run["output_dir"])) == before


def test_a_folder_that_is_no_run_is_left_alone(options, refused, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("mine")
    assert "holds no run" in refused(options())
    (tmp_path / "file").write_text("mine")
    assert "is a file" in refused(options(output_dir=str(tmp_path / "file")))


def test_a_finished_run_may_be_resumed_and_stays_as_it_is(run, made, tmp_path):
    status, stderr = start(run | {"resume": True}, tmp_path / "process").finish()
    assert status == 0, stderr
    for name in ("summary.json", "metrics.jsonl", "hf/model.safetensors"):
        assert (Path(run["output_dir"]) / name).read_text("latin1") == (made("zero1") / name).read_text("latin1")


def test_a_dry_run_prints_the_plan_and_writes_nothing(options, tmp_path):
    values = options(dry_run=True, print_trainable=True, ds_config=ds_config("zero3"))
    status, stderr = start(values, tmp_path / "process").finish()
    assert status == 0
    for words in ("20 of 8 × 32", "accumulation 4", "23360", "ZeRO 3", "lm_head.weight 97×32", "data_train"):
        assert words in stderr, stderr
    assert not (tmp_path / "run").exists()


def test_a_fresh_interpreter_says_the_same(options, tmp_path):
    """The tests above fork from a warm process; this one starts the command as a user does."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    words = command_line(options(train_tokens=0))
    done = subprocess.run([sys.executable, SCRIPT, *words], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --train_tokens=0 must be at least 1\n"
    assert not (tmp_path / "run").exists()
