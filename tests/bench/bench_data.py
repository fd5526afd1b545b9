"""Data side by side with Megatron's: preprocessing text, reading samples, building the order of a large corpus.

python -m tests.bench.bench_data [--parts samples index]
python -m tests.bench.bench_data --parts preprocessing --text TEXT.jsonl --tokenizer FOLDER --megatron_lm CHECKOUT

Samples and index need megatron-core (the extra `dev`), preprocessing a checkout of Megatron-LM; what is not there is left out.
"""

import dataclasses
import functools
import importlib.util
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil

from megahedge.data.indexed_dataset import IndexedDataset, bin_path, idx_path
from megahedge.data.indexed_writer import IndexedDatasetWriter, write_index
from megahedge.utils.cli import Count, parse_options, run_main
from megahedge.utils.errors import InputError, check_known
from tests.bench.measure import interleaved_seconds, machine, median_ratio, peak_of, print_table

REPOSITORY = Path(__file__).resolve().parents[2]
PARTS = ("samples", "index", "preprocessing")
OURS, THEIRS = "megahedge", "megatron-core"
_SECONDS_BETWEEN_LOOKS = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchDataOptions:
    """tests/bench/bench_data.py"""

    parts: tuple[str, ...] = ("samples", "index")
    """What to measure: samples, index, preprocessing."""
    rounds: int = 5
    """Timed rounds of samples and index, each of which runs everything once."""
    seq_len: int = 1024
    """Tokens a sample."""
    documents: Count = 8_000_000
    """Documents of the synthetic corpus of `index`; their tokens are a file with a hole."""
    epochs: float = 1.1
    """Of that corpus, whose order is built."""
    samples: Count = 2000
    """Samples that a timed piece of reading reads, at random."""
    text: str | None = None
    """File of JSON lines for `preprocessing`, not compressed, as Megatron-LM reads no other."""
    repeat: int = 10
    """Preprocessing is measured on the text and on so many copies of it."""
    tokenizer: str | None = None
    """Folder of a Hugging Face tokenizer for `preprocessing`."""
    megatron_lm: str | None = None
    """Checkout of Megatron-LM, whose tools/preprocess_data.py is measured beside ours."""
    workers: int = 2
    """Processes that tokenise, on both sides."""

    def __post_init__(self):
        for part in self.parts:
            check_known("parts", part, PARTS)
        if "preprocessing" in self.parts and (self.text is None or self.tokenizer is None):
            raise InputError("--parts preprocessing needs --text FILE.jsonl and --tokenizer FOLDER")
        if self.repeat < 2:
            raise InputError(f"--repeat={self.repeat} must be at least 2")


def main() -> None:
    """Entry point."""
    options = parse_options(BenchDataOptions, prog="bench_data.py", description="Data handling beside Megatron's.")
    print(machine())
    has_megatron = importlib.util.find_spec("megatron") is not None
    if not has_megatron:
        print(f"{THEIRS} is not installed: only {OURS} is measured")
    with tempfile.TemporaryDirectory() as folder:
        if "samples" in options.parts:
            _samples(options, Path(folder), has_megatron)
        if "index" in options.parts:
            _index(options, Path(folder), has_megatron)
        if "preprocessing" in options.parts:
            _preprocessing(options, Path(folder))


# ---- reading samples ------------------------------------------------------------------------------------------------------------------


def _samples(options: BenchDataOptions, folder: Path, has_megatron: bool) -> None:
    """Tokens and labels of a sample as tensors, at random places of a corpus of documents like those of OpenWebText."""
    draw = np.random.default_rng(1)
    lengths = _lengths(20_000, draw)
    with IndexedDatasetWriter(folder / "text", np.uint16) as writer:
        for first in range(0, len(lengths), 1000):
            part = lengths[first : first + 1000]
            writer.add_documents(draw.integers(0, 50_000, int(part.sum()), dtype=np.uint16), part)
        writer.finish()
    dataset = IndexedDataset(folder / "text")
    count = dataset.num_tokens // options.seq_len - 1
    places = draw.integers(0, count, options.samples).tolist()
    works = {OURS: functools.partial(_read_ours, str(folder / "text"), options.seq_len, places)()}
    if has_megatron:
        works[THEIRS] = _read_theirs(str(folder / "text"), options.seq_len, places, str(folder / "cache"))
    seconds = interleaved_seconds(works, options.rounds)
    rows = []
    for name in works:
        microseconds = min(seconds[name]) / options.samples * 1e6
        faster = median_ratio(seconds[THEIRS], seconds[name]) if has_megatron else float("nan")
        rows.append([name, f"{microseconds:.1f}", f"{faster:.2f}"])
    print(f"\n{options.samples} random samples of {options.seq_len} tokens, {dataset.num_documents} documents")
    print_table(["", "best, µs a sample", f"times as fast as {THEIRS}"], rows)


def _lengths(count: int, draw: np.random.Generator) -> np.ndarray:
    """Document lengths whose logarithm is normal, about 1100 tokens in the mean."""
    return np.clip(draw.lognormal(6.5, 1.0, count), 1, 100_000).astype(np.int32)


def _read_ours(prefix: str, seq_len: int, places: list[int]) -> Callable[[], None]:
    from megahedge.data.loader import BatchLoader, TrainingData

    loader = BatchLoader(TrainingData(prefix, seq_len, 7), global_batch_size=1, micro_batch_size=1)

    def read() -> None:
        for place in places:
            next(loader.micro_batches(place))

    return read


def _read_theirs(prefix: str, seq_len: int, places: list[int], cache: str) -> Callable[[], None]:
    dataset = gpt_dataset(prefix, seq_len, None, cache)

    def read() -> None:
        for place in places:
            dataset[place]

    return read


def gpt_dataset(prefix: str, seq_len: int, num_samples: int | None, cache: str | None):
    """megatron-core's dataset of all documents of a pair."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset as Theirs
    from megatron.core.datasets.utils import Split

    tokenizer = SimpleNamespace(eod=0, pad=-1, vocab_size=50_000, unique_identifiers={"class": "none"})
    config = GPTDatasetConfig(
        random_seed=7,
        sequence_length=seq_len,
        blend=None,
        split="1,0,0",
        path_to_cache=cache,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    low = Theirs(prefix)
    return GPTDataset(low, prefix, np.arange(len(low), dtype=np.int32), num_samples, Split.train, config)


# ---- the order of a large corpus ------------------------------------------------------------------------------------------------------


def _index(options: BenchDataOptions, folder: Path, has_megatron: bool) -> None:
    """From the open files to an order that is on the disk, each in a process of its own that has imported what it needs."""
    lengths = _lengths(options.documents, np.random.default_rng(2))
    prefix = str(folder / "large")
    with open(idx_path(prefix), "wb") as handle:
        blocks = [lengths[first : first + (1 << 20)] for first in range(0, len(lengths), 1 << 20)]
        write_index(handle, np.dtype(np.uint16), len(lengths), lambda: iter(blocks), len(lengths) + 1, [np.arange(len(lengths) + 1)])
    total = int(lengths.sum(dtype=np.int64))
    with open(bin_path(prefix), "wb") as handle:
        handle.truncate(2 * total)
    num_samples = int(options.epochs * total) // options.seq_len
    builders = {OURS: _build_ours} | ({THEIRS: _build_theirs} if has_megatron else {})
    found = {name: [] for name in builders}
    for number in range(options.rounds):
        for name, build in builders.items():
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found[name].append(pool.apply(_measured, (build, prefix, options.seq_len, num_samples, str(folder / f"{name}{number}"))))
    rows, theirs = [], list(zip(*found[THEIRS], strict=True)) if has_megatron else None
    for name, measured in found.items():
        seconds, sizes = zip(*measured, strict=True)
        ratios = [median_ratio(mine, other) for mine, other in zip((seconds, sizes), theirs, strict=True)] if theirs else []
        rows.append([name, f"{min(seconds):.2f}", f"{max(sizes) / 1e6:.0f}", *(f"{ratio:.2f}" for ratio in ratios)])
    print(f"\norder of {options.epochs:g} epochs of {len(lengths)} documents, {total / 1e9:.2f}B tokens, {num_samples} samples")
    print_table(["", "best, s", "most memory, MB", *([f"time / {THEIRS}", f"memory / {THEIRS}"] if has_megatron else [])], rows)


def _measured(build: Callable[..., None], *arguments) -> tuple[float, int]:
    """Seconds, and most memory beyond what the imports hold."""
    build.prepare()
    started = time.perf_counter()
    size = peak_of(functools.partial(build, *arguments))
    return time.perf_counter() - started, size


def _build_ours(prefix: str, seq_len: int, num_samples: int, cache: str) -> None:
    """All that a run of that length reads: the orders of documents and samples of every epoch it enters."""
    from megahedge.data.sample_index import SampleIndex

    index = SampleIndex(IndexedDataset(prefix), seq_len, 7, cache)
    for epoch in range(index.epoch(num_samples - 1) + 1):
        index.read(index.first_sample(epoch))


def _build_theirs(prefix: str, seq_len: int, num_samples: int, cache: str) -> None:
    gpt_dataset(prefix, seq_len, num_samples, cache)


def _import_ours() -> None:
    import megahedge.data.sample_index  # noqa: F401


def _import_theirs() -> None:
    import megatron.core.datasets.gpt_dataset
    import megatron.core.datasets.helpers  # noqa: F401


_build_ours.prepare, _build_theirs.prepare = _import_ours, _import_theirs


# ---- preprocessing --------------------------------------------------------------------------------------------------------------------


def _preprocessing(options: BenchDataOptions, folder: Path) -> None:
    """Whole commands, start included, on the text and on copies of it; and what more text adds, in which no start is left."""
    text = Path(options.text).read_bytes()
    text += b"" if text.endswith(b"\n") else b"\n"
    documents = text.count(b"\n")
    commands = {OURS: _our_command} | ({"Megatron-LM": _their_command} if options.megatron_lm else {})
    found = {name: {} for name in commands}
    for copies in (1, options.repeat):
        source = folder / f"text{copies}.jsonl"
        with open(source, "wb") as handle:
            for _ in range(copies):
                handle.write(text)
        for name, command in commands.items():
            found[name][copies] = _run(command(options, source, folder / f"{name}{copies}"), options)
    rows = []
    for name, ((first, first_peak), (second, second_peak)) in ((name, values.values()) for name, values in found.items()):
        steady = (options.repeat - 1) * documents / (second - first)
        rates = [documents / first, options.repeat * documents / second, steady]
        rows.append([name, *(f"{rate:.0f}" for rate in rates), f"{first_peak / 1e6:.0f}", f"{second_peak / 1e6:.0f}"])
    print(f"\n{documents} documents, {len(text) / 1e6:.1f} MB, and {options.repeat} times as many; {options.workers} workers")
    many = f"{options.repeat}×"
    print_table(["", "documents/s, 1×", f"documents/s, {many}", "documents/s without start", "peak MB, 1×", f"peak MB, {many}"], rows)


def _our_command(options: BenchDataOptions, source: Path, prefix: Path) -> list[str]:
    words = ["--input", source, "--output_prefix", prefix, "--tokenizer", options.tokenizer, "--workers", options.workers]
    return [sys.executable, str(REPOSITORY / "tools" / "preprocess_owt.py"), *map(str, words), "--val_fraction", "0"]


def _their_command(options: BenchDataOptions, source: Path, prefix: Path) -> list[str]:
    words = ["--input", source, "--output-prefix", prefix, "--tokenizer-type", "HuggingFaceTokenizer", "--workers", options.workers]
    words += ["--tokenizer-model", options.tokenizer, "--append-eod"]
    return [sys.executable, str(Path(options.megatron_lm) / "tools" / "preprocess_data.py"), *map(str, words)]


def _run(command: list[str], options: BenchDataOptions) -> tuple[float, int]:
    """Seconds of a command, and the most memory that its processes held together (pages that they share counted once)."""
    paths = [str(REPOSITORY), *([options.megatron_lm] if options.megatron_lm else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    started, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile() as output:
        process = psutil.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            peak = max(peak, _memory_of(process))
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        seconds = time.perf_counter() - started
        if process.returncode:
            output.seek(0)
            raise InputError(f"{' '.join(command)} ended with status {process.returncode}: {output.read().decode()[-2000:]}")
    return seconds, peak


def _memory_of(process: psutil.Process) -> int:
    total = 0
    for each in (process, *process.children(recursive=True)):
        try:
            total += each.memory_full_info().pss
        except psutil.Error:  # it has ended meanwhile
            continue
    return total


if __name__ == "__main__":
    run_main(main)
