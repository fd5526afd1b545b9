"""Cutting and joining parameters are inverse; fresh parameters do not depend on how they are cut."""

import itertools

import pytest
import torch

from megahedge.models.language_model import LanguageModel
from megahedge.parallel.initialize import draw, initialize_parameters
from megahedge.parallel.sharding import Init, ShardSpec, local_shape, named_specs, shard, shard_range, unshard
from megahedge.parallel.topology import TensorParallel, Topology
from megahedge.utils.errors import InputError
from tests.models.small import small_config


@pytest.mark.parametrize(("length", "size", "dim"), itertools.product((1, 2, 5, 8, 97), (1, 2, 3, 4, 7), (0, 1, 2)))
def test_unshard_inverts_shard_at_every_length(length, size, dim):
    shape = [3, 4, 2]
    shape[dim] = length
    spec = ShardSpec(dim, tuple(shape))
    full = torch.arange(1.0, 1 + 24 // [3, 4, 2][dim] * length).reshape(shape)
    shards = [shard(full, spec, rank, size) for rank in range(size)]
    assert {tuple(piece.shape) for piece in shards} == {local_shape(spec, size)}
    assert torch.equal(unshard(shards, spec), full)
    assert sum(piece.count_nonzero() for piece in shards) == full.numel()  # padding is zero


@pytest.mark.parametrize(("length", "size"), [(97, 4), (5, 4), (1, 4), (8, 2)])
def test_shard_ranges_cover_the_rows_once(length, size):
    ranges = [shard_range(ShardSpec(0, (length,)), rank, size) for rank in range(size)]
    assert [row for first, last in ranges for row in range(first, last)] == list(range(length))


def test_replicated_parameter_is_whole_everywhere():
    spec, full = ShardSpec(None, (3,)), torch.arange(3.0)
    assert all(torch.equal(shard(full, spec, rank, 4), full) for rank in range(4))
    assert torch.equal(unshard([full] * 4, spec), full)


def test_shard_refuses_a_tensor_of_another_shape():
    with pytest.raises(ValueError, match="expected"):
        shard(torch.ones(4, 2), ShardSpec(0, (5, 2)), 0, 2)


@pytest.mark.parametrize("tied", [False, True])
def test_fresh_parameters_are_the_same_for_every_tp_size(tied):
    config = small_config(tie_word_embeddings=tied)

    def pieces(size):
        models = [LanguageModel(config, TensorParallel(None, rank, size)) for rank in range(size)]
        for model in models:
            initialize_parameters(model, seed=3, tensor_parallel=model.tensor_parallel)
        return models

    whole = pieces(1)[0]
    for size in (2, 4):
        parts = [dict(model.named_parameters()) for model in pieces(size)]
        for name, spec in named_specs(whole):
            assert torch.equal(unshard([part[name].data for part in parts], spec), whole.get_parameter(name)), name


def test_draws_differ_by_name_and_seed_only():
    first = draw("a", (64, 64), Init(std=0.02), seed=1)
    assert torch.equal(first, draw("a", (64, 64), Init(std=0.02), seed=1))
    assert not torch.equal(first, draw("b", (64, 64), Init(std=0.02), seed=1))
    assert not torch.equal(first, draw("a", (64, 64), Init(std=0.02), seed=2))
    assert abs(first.std() - 0.02) < 0.02 * 0.05  # 4096 draws: the standard error is 1.1 %


def test_fresh_model_has_zero_biases_unit_norms_and_smaller_residual_matrices():
    config = small_config(num_layers=8)
    model = LanguageModel(config)
    initialize_parameters(model, seed=0, tensor_parallel=model.tensor_parallel)
    block = model.blocks[3]
    assert not block.mlp.up_proj.bias.any() and not block.mixer.out_proj.bias.any()
    assert (block.mixer_norm.weight == 1).all() and not block.mixer_norm.bias.any()
    assert abs(block.mixer.qkv_proj.weight.std() / 0.02 - 1) < 0.05
    assert abs(block.mlp.down_proj.weight.std() / (0.02 / 4) - 1) < 0.05  # 1 / √(2 · 8 layers)


def test_every_sharded_parameter_carries_deepspeeds_mark():
    model = LanguageModel(small_config(), TensorParallel(None, 0, 2))
    for name, parameter in model.named_parameters():
        assert hasattr(parameter, "tensor_model_parallel") == (parameter.shard_spec.dim is not None), name
    replicated = {name.rsplit(".", 2)[-2] + "." + name.rsplit(".", 1)[-1] for name, spec in named_specs(model) if spec.dim is None}
    norms = {f"{norm}.{kind}" for norm in ("mixer_norm", "mlp_norm", "final_norm") for kind in ("weight", "bias")}
    assert replicated == norms | {"out_proj.bias", "down_proj.bias"}


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, 3, "tp_size=3 does not divide num_heads=4; use 1, 2 or 4"),
        ({"num_heads": 8, "intermediate_size": 98}, 4, "tp_size=4 does not divide intermediate_size=98; use 1, 2, 7, 14, 49 or 98"),
        ({"num_heads": 1}, 2, "tp_size=2 does not divide num_heads=1; use 1"),
    ],
)
def test_tp_size_that_does_not_divide_names_those_that_do(changes, size, message):
    with pytest.raises(InputError, match=message):
        LanguageModel(small_config(**changes), TensorParallel(None, 0, size))


def test_single_topology_needs_no_process_group():
    topology = Topology.single()
    assert topology.tensor_parallel == TensorParallel() and topology.mpu.get_model_parallel_world_size() == 1
