"""The probe gives the known answer for models whose use of context is known."""

import pytest
import torch

from megahedge.data.loader import IGNORE_INDEX, Batch
from megahedge.evaluation.context_probe import probe_context
from megahedge.utils.errors import InputError

HALF = 50


def repeated_windows(count=60, half=HALF, micro_batch_size=4) -> list[Batch]:
    """Windows of 2 · half tokens whose second half repeats the first, in which no token comes twice."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.stack([torch.randperm(1000, generator=generator)[:half].repeat(2) for _ in range(count)])
    labels = rows.roll(-1, 1)
    batches = range(0, count, micro_batch_size)
    return [
        Batch(
            rows[first : first + micro_batch_size], labels[first : first + micro_batch_size], tuple(range(first, first + micro_batch_size))
        )
        for first in batches
    ]


def copy_losses(tokens, labels):
    """1 nat wherever the token HALF places back is not the current one: 0 on a window that repeats itself."""
    losses = torch.zeros(tokens.shape)
    losses[:, HALF:] = (tokens[:, HALF:] != tokens[:, :-HALF]).float()
    return losses


def bigram_losses(tokens, labels):
    return torch.sin(tokens.float() * 3 + labels.float())


def bag_losses(tokens, labels):
    """Looks at which tokens came in the first half, and not at their order."""
    return bigram_losses(tokens, labels) * tokens[:, :HALF].sum(1, keepdim=True)


def test_copying_model_loses_what_shuffling_takes_away():
    probe = probe_context(copy_losses, repeated_windows(), seed=1)
    assert probe.intact == 0
    # a random order of n keeps one token in place on average, with variance 1
    assert probe.difference == pytest.approx(1 - 1 / HALF, abs=4 / HALF / 60**0.5)
    assert probe.standard_error == pytest.approx(1 / HALF / 60**0.5, rel=0.35)  # 4 sigma of an estimate from 60 windows
    assert probe.windows == 60


@pytest.mark.parametrize("token_losses", [bigram_losses, bag_losses])
def test_model_that_ignores_the_order_of_context_shows_exactly_nothing(token_losses):
    probe = probe_context(token_losses, repeated_windows(), seed=1)
    assert probe.intact != 0
    assert (probe.difference, probe.standard_error) == (0, 0)


def test_only_the_first_half_is_shuffled():
    seen = []

    def recording(tokens, labels):
        seen.append((tokens.clone(), labels.clone()))
        return torch.zeros(tokens.shape)

    probe_context(recording, repeated_windows(count=8), seed=1)
    for (intact, labels), (shuffled, same_labels) in zip(seen[::2], seen[1::2], strict=True):
        assert torch.equal(labels, same_labels)
        assert torch.equal(intact[:, HALF:], shuffled[:, HALF:])
        assert torch.equal(intact[:, :HALF].sort().values, shuffled[:, :HALF].sort().values)
        assert (intact[:, :HALF] != shuffled[:, :HALF]).any(1).all()


def test_batch_size_does_not_change_the_order_and_the_seed_does():
    probes = [probe_context(copy_losses, repeated_windows(micro_batch_size=size), seed=1) for size in (1, 4, 60)]
    assert probes[0] == probes[1] == probes[2]
    assert probe_context(copy_losses, repeated_windows(), seed=2) != probes[0]


def test_windows_that_are_not_whole_are_passed_over():
    batches = repeated_windows(count=8)
    batches[1].labels[1, -1] = IGNORE_INDEX
    batches[0].labels[:] = IGNORE_INDEX
    assert probe_context(copy_losses, batches, seed=1).windows == 3


@pytest.mark.parametrize("batches", [[], repeated_windows(count=1, micro_batch_size=1)])
def test_fewer_than_two_windows_are_refused(batches):
    with pytest.raises(InputError, match="needs 2 whole windows"):
        probe_context(copy_losses, batches, seed=1)
