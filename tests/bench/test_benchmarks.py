"""The benchmarks run and print a line for each thing that they time; what they measure is for people to read."""

import sys

import pytest

from tests.bench import bench_data, bench_decode, bench_scan, bench_step

SMALL = ["--hidden_size=16", "--num_layers=1", "--num_heads=2", "--vocab_size=64", "--rounds=1"]
SCAN = ["--batch=1", "--num_heads=1", "--head_dim=8", "--seq_lens=70", "--rounds=1"]
DATA = ["--parts", "samples", "index", "--rounds=1", "--samples=20", "--documents=1000"]
DECODE = [*SMALL, "--prefills=70", "--contexts=70", "--new_tokens=2"]
CASES = [
    (bench_scan, SCAN, ["softmax attention", *bench_scan.STRUCTURES]),
    (bench_step, [*SMALL, "--seq_len=70"], [*bench_step.BASELINES, *bench_step.STUDENTS]),
    (bench_data, DATA, ["20 random samples", "order of 1.1 epochs of 1000 documents", "megahedge"]),
    (bench_decode, DECODE, ["prompt, teacher", "decoding, head", "decoding, channel"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("module", "arguments", "lines"), CASES, ids=[module.__name__.rpartition(".")[2] for module, *_ in CASES])
def test_a_benchmark_prints_its_table(module, arguments, lines, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [module.__name__, *arguments])
    module.main()
    printed = capsys.readouterr().out.splitlines()
    assert all(any(line.startswith(start) for line in printed) for start in lines)
