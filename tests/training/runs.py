"""Tiny runs for the tests: a corpus, its tokenizer, a model of 20,000 parameters, and worlds that train it many times over."""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import tokenizers
import torch
import torch.distributed as dist
from safetensors import SafetensorError

from megahedge.checkpoint import store
from megahedge.checkpoint.store import Checkpoint
from megahedge.config.options import PretrainOptions
from megahedge.data.indexed_writer import IndexedDatasetWriter
from megahedge.data.meta import DatasetMeta, SplitMeta, tokenizer_digest, write_meta
from megahedge.data.tokenizer import load_tokenizer
from megahedge.evaluation.perplexity import Perplexity
from megahedge.models import hf_weights
from megahedge.models.hf_weights import load_config_file
from megahedge.parallel.sharding import Init, declare_parameter
from megahedge.stages.base import plan_run, run_stage
from megahedge.stages.pretrain import Pretrain, pretrain
from megahedge.training import checkpointing, loop
from megahedge.training.metrics import TIMING_KEYS, MetricsLog, read_metrics
from megahedge.training.signals import SIGNALS

REPOSITORY = Path(__file__).parents[2]
VOCAB_SIZE = 97
STEPS = 20
SEQ_LEN, GLOBAL_BATCH_SIZE = 32, 8
MODEL = {
    "model_type": "gpt_neox",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "rotary_pct": 0.25,
    "hidden_act": "gelu",
    "use_parallel_residual": True,
    "tie_word_embeddings": False,
}


# ---- inputs -------------------------------------------------------------------------------------------------------------------


def make_inputs(folder: Path) -> None:
    """data_{train,val}.{bin,idx}, data.meta.json, configs of models and of DeepSpeed, and a folder `tokenizer`."""
    make_tokenizer(folder / "tokenizer", VOCAB_SIZE)
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "tied.json").write_text(json.dumps(MODEL | {"tie_word_embeddings": True}))
    # by default ZeRO-3 keeps parameters as small as ours whole on every rank
    released = {"stage": 3, "stage3_param_persistence_threshold": 0}
    (folder / "zero3_released.json").write_text(json.dumps({"zero_optimization": released}))
    write_odd_model(folder / "odd.json")
    splits = {"train": _write_split(folder / "data_train", 200, seed=0), "val": _write_split(folder / "data_val", 8, seed=1)}
    digest = tokenizer_digest(load_tokenizer(str(folder / "tokenizer")))
    write_meta(folder / "data", DatasetMeta(digest, str(folder / "tokenizer"), VOCAB_SIZE, 0, splits))


def make_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer of whole words; id 0 ends a document."""
    words = ["<|endoftext|>", *(f"w{index}" for index in range(1, vocab_size))]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(zip(words, range(vocab_size), strict=True)), unk_token=words[0]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": words[0], "bos_token": words[0], "unk_token": words[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


def _write_split(prefix: Path, num_documents: int, seed: int) -> SplitMeta:
    """Documents in which a token mostly decides the next, so that there is something to learn."""
    generator = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(num_documents):
            tokens = [int(generator.integers(1, VOCAB_SIZE))]
            for _ in range(int(generator.integers(10, 150))):
                follows = 1 + (tokens[-1] * 5 + 3) % (VOCAB_SIZE - 1)
                tokens.append(follows if generator.random() < 0.8 else int(generator.integers(1, VOCAB_SIZE)))
            writer.add_document(np.array([*tokens, 0], np.uint16))
        writer.finish()
        return SplitMeta(writer.num_documents, writer.num_tokens, 5 * writer.num_tokens, writer.num_tokens)


def write_odd_model(path: Path) -> None:
    """A model with parameters of odd sizes, which no two processes can halve."""
    path.write_text(json.dumps(MODEL | {"hidden_size": 33, "num_attention_heads": 3, "intermediate_size": 65}))


def arguments(folder: Path, run: str, **changes) -> dict:
    """Options of a run of STEPS steps, in fp32, with several micro-batches a step."""
    return {
        "model_config": str(folder / "model.json"),
        "data_path": (str(folder / "data"),),
        "output_dir": str(folder / run),
        "ds_config": ds_config("zero1"),
        "dtype": "fp32",
        "seq_len": SEQ_LEN,
        "global_batch_size": GLOBAL_BATCH_SIZE,
        "micro_batch_size": 2,
        "train_tokens": STEPS * SEQ_LEN * GLOBAL_BATCH_SIZE,
        "lr": 5e-3,
        "warmup_fraction": 0.1,
        "eval_interval": 10,
        "eval_tokens": 500,
        "save_interval": 10,
        "keep_last": 100,
        "seed": 7,
    } | changes


def ds_config(name: str) -> str:
    """Path of a configuration that the repository carries."""
    return str(REPOSITORY / "ds_configs" / f"{name}.json")


def command_line(options: dict) -> list[str]:
    """The same options as words of a command line."""
    words = []
    for name, value in options.items():
        if value is None:
            continue
        if isinstance(value, bool):
            words += [f"--{name}"] if value else []
        else:
            words += [f"--{name}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return words


# ---- what runs inside a world: every name here is called on all ranks -----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """A run to make, by the names of `arguments`' changes; the rest spoils it on purpose."""

    name: str
    changes: dict
    poison: "Poison | None" = None
    failing_save: int | None = None
    """Number of the save_file call on rank 0 that finds the disk full."""
    full_until_save: int | None = None
    """The disk has no room on rank 0 before that save, counted from 0."""
    best_at: int | None = None
    """The validation loss is said to be its lowest at this step."""
    failing_export: bool = False
    """The disk is full in the middle of the export."""
    failing_metrics: int | None = None
    """Number of the line of metrics.jsonl from which on its disk is full."""
    stop_in_step: int | None = None
    """The last rank gets SIGTERM just before this step."""
    copied_from: str | None = None
    """Begin with a copy of that run as a crash after `crashed_after` would have left it, or with all of it where that is None."""
    crashed_after: int | None = 10
    stage: type[Pretrain] | None = None
    """What to train instead of Pretrain; nothing is exported then."""
    expected_error: str | None = None
    """Words of the RuntimeError that ends the run."""


@dataclasses.dataclass(frozen=True)
class Poison:
    """NaN in one micro-batch of one rank, at each of some steps."""

    kinds: tuple[str, ...]
    """Where it appears first, in turn: `loss`, or `gradient` (of one parameter, with a finite loss)."""
    steps: tuple[int, ...]
    rank: int
    micro_batch: int = 1


class PoisonedPretrain(Pretrain):
    """Pretraining with NaNs where `poison` says."""

    poison: Poison

    def __init__(self, config, tensor_parallel, options):
        super().__init__(config, tensor_parallel, options)
        self._calls = 0
        self._per_step = options.global_batch_size // (options.micro_batch_size * (dist.get_world_size() // options.tp_size))
        self.student.final_norm.weight.register_hook(lambda gradient: gradient * self._factor("gradient"))

    def _factor(self, kind: str) -> float:
        poison = self.poison
        step, micro_batch = divmod(self._calls - 1, self._per_step)
        if (step + 1, micro_batch) not in [(bad_step, poison.micro_batch) for bad_step in poison.steps] or poison.rank != dist.get_rank():
            return 1.0
        kind_now = poison.kinds[poison.steps.index(step + 1) % len(poison.kinds)]
        return float("nan") if kind == kind_now else 1.0

    def loss(self, *batch):
        self._calls += 1
        loss, metrics = super().loss(*batch)
        return loss * self._factor("loss"), metrics


class PretrainWithOddMetrics(Pretrain):
    """Pretraining that reports a value that is NaN on the last rank, and one that is finite."""

    def loss(self, *batch):
        loss, _ = super().loss(*batch)
        broken = float("nan") if dist.get_rank() == dist.get_world_size() - 1 else 1.0
        return loss, {"broken": loss.detach() * broken, "rank": torch.tensor(float(dist.get_rank()))}


class PretrainReleased(Pretrain):
    """Pretraining that fails unless ZeRO-3 has released every parameter when the first evaluation begins."""

    started = False

    def token_losses(self, *batch):
        if not self.started:  # later, DeepSpeed knows the order of modules and fetches parameters ahead
            whole = [name for name, parameter in self.student.named_parameters() if parameter.numel() > 0]
            assert not whole, whole
            self.started = True
        return super().token_losses(*batch)


class PretrainWithoutEnd(Pretrain):
    """Pretraining whose evaluations find no number once a step was taken."""

    begun = False

    def loss(self, *batch):
        self.begun = True
        return super().loss(*batch)

    def token_losses(self, *batch):
        losses = super().token_losses(*batch)
        return losses * float("nan") if self.begun else losses


class PretrainWithoutStart(Pretrain):
    """Pretraining from weights with which nothing is a number."""

    def token_losses(self, *batch):
        return super().token_losses(*batch) * float("nan")


class PretrainWithUnusedParameter(Pretrain):
    """Pretraining of a model with a parameter that nothing uses."""

    def __init__(self, config, tensor_parallel, options):
        super().__init__(config, tensor_parallel, options)
        self.student.forgotten = declare_parameter((3, 4), Init(0.02), tensor_parallel)


def make_runs(folder: Path, runs: list[Run]) -> dict[str, str | None]:
    """Make every run, one after the other in this process; returns the message of the expected error that ended it, if one did."""
    return {run.name: _make_run(folder, run) for run in runs}


def _make_run(folder: Path, run: Run) -> str | None:
    if run.copied_from is not None:
        if dist.get_rank() == 0:
            copy_crashed(folder / run.copied_from, folder / run.name, run.crashed_after)
        dist.barrier()
    options = PretrainOptions(**arguments(folder, **({"run": run.name} | run.changes)))
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    with _spoiled(run):
        try:
            _train(run, options)
        except RuntimeError as error:
            if run.expected_error is None or run.expected_error not in str(error):
                raise
            return str(error)
        finally:
            for number, handler in handlers.items():  # a run that was asked to stop leaves them ignored
                signal.signal(number, handler)
    return None


def _train(run: Run, options: PretrainOptions) -> None:
    if run.poison is None and run.stage is None:
        pretrain(options)
        return
    PoisonedPretrain.poison = run.poison
    tokenizer = load_tokenizer(str(Path(options.model_config).parent / "tokenizer"))
    plan = plan_run(options, load_config_file(options.model_config), "", tokenizer, "the tests' tokenizer")
    run_stage(run.stage or PoisonedPretrain, plan)


def copy_crashed(run: Path, copy: Path, step: int | None) -> None:
    """A copy of a run without what came after the checkpoint of `step`, metrics excepted: they run ahead of checkpoints."""
    shutil.copytree(run, copy)
    if step is None:
        return
    shutil.rmtree(copy / "hf", ignore_errors=True)
    (copy / "summary.json").unlink(missing_ok=True)
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(copy / "checkpoints" / f"step-{later:08d}", ignore_errors=True)


@contextlib.contextmanager
def _spoiled(run: Run) -> Iterator[None]:
    """Within `with`, what the run says goes wrong."""
    first, last = dist.get_rank() == 0, dist.get_rank() == dist.get_world_size() - 1
    with contextlib.ExitStack() as patches:
        if run.failing_save is not None and first:
            patches.enter_context(_before_call(store, "save_file", run.failing_save, _fill_the_disk))
        if run.full_until_save is not None and first:
            patches.enter_context(_no_room(run.full_until_save))
        if run.best_at is not None:
            patches.enter_context(mock.patch.object(loop, "_evaluate", functools.partial(_evaluate_as_if, loop._evaluate, run.best_at)))
        if run.failing_export and first:
            patches.enter_context(_before_call(hf_weights, "save_file", 1, _fill_the_disk))
        if run.failing_metrics is not None and first:
            patches.enter_context(_before_call(MetricsLog, "write", run.failing_metrics, _lose_the_metrics_file))
        if run.stop_in_step is not None and last:
            # what the loop asks for just before it looks whether it shall stop
            patches.enter_context(_before_call(loop, "learning_rate", run.stop_in_step, _signal_myself))
        yield


@contextlib.contextmanager
def _before_call(owner, name: str, number: int, action: Callable) -> Iterator[None]:
    """Within `with`, call `action` with the arguments of the `number`-th call of `owner.name`, just before that."""
    original, calls = getattr(owner, name), itertools.count(1)

    def spoiled(*arguments, **keywords):
        if next(calls) == number:
            action(*arguments, **keywords)
        return original(*arguments, **keywords)

    setattr(owner, name, spoiled)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _evaluate_as_if(original: Callable, best_at: int, job, progress) -> Perplexity:
    """The evaluation of a step, with a loss that is 1 at `best_at` and higher the further away it is."""

    def evaluate() -> Perplexity:
        tokens = job.evaluate().tokens
        return Perplexity(nats=tokens * (1.0 + abs(progress.step - best_at)), tokens=tokens)

    return original(dataclasses.replace(job, evaluate=evaluate), progress)


@contextlib.contextmanager
def _no_room(until_save: int) -> Iterator[None]:
    """Within `with`, saves before that one, counted from 0, find a byte too few on the disk."""
    original, calls = checkpointing.checkpoint_bytes, itertools.count()

    def larger(student):
        return original(student) if next(calls) >= until_save else shutil.disk_usage("/").total + 1

    with mock.patch.object(checkpointing, "checkpoint_bytes", larger):
        yield


def _fill_the_disk(tensors, path, **keywords):
    """Half a file, and the exception that safetensors then raises (it is no OSError)."""
    Path(path).write_bytes(b"half")
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def _lose_the_metrics_file(log, *arguments):
    log._handle = open("/dev/full", "w")  # noqa: SIM115 (every write there fails as on a full disk)


def _signal_myself(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)


# ---- looking at what was made -----------------------------------------------------------------------------------------------------


def checkpoint_at(run: Path, step: int) -> Checkpoint:
    """The run's checkpoint of that step."""
    return Checkpoint(run / "checkpoints" / f"step-{step:08d}")


def state_of(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Every parameter and moment by name."""
    return {f"{group} {name}": checkpoint.read(group, name) for group in ("parameters", "optimizer") for name in checkpoint.names(group)}


def differing(first: Checkpoint, second: Checkpoint) -> list[str]:
    """Names of the tensors that are not bit for bit the same in both."""
    a, b = state_of(first), state_of(second)
    assert a.keys() == b.keys() and len(a) > 50  # 28 parameters, two moments each
    return [name for name in a if not torch.equal(a[name].view(torch.int32), b[name].view(torch.int32))]


def measured(run: Path, kind: str | None = None) -> list[dict]:
    """metrics.jsonl without what the clock decides."""
    lines = [{key: value for key, value in line.items() if key not in TIMING_KEYS} for line in read_metrics(run / "metrics.jsonl")]
    return [line for line in lines if kind in (None, line["kind"])]


def curve(run: Path, key: str) -> np.ndarray:
    """A value of every training step; NaN where it was not finite."""
    return np.array([line[key] for line in measured(run, "train")], float)


def assert_same_end(run: Path, unbroken: Path, step: int = STEPS) -> None:
    """Parameters, moments, progress and metrics at the last step are bit for bit those of the unbroken run."""
    mine, theirs = checkpoint_at(run, step), checkpoint_at(unbroken, step)
    assert differing(mine, theirs) == []
    assert mine.record["progress"] == theirs.record["progress"]
    assert measured(run) == measured(unbroken)
