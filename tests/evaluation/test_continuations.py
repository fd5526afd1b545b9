"""Log-likelihoods and greedy text by hand, whatever the batch size."""

import logging
import math

import pytest
import torch

from megahedge.config.mixer import MixerConfig
from megahedge.evaluation.continuations import ContinuationScorer
from megahedge.models.language_model import LanguageModel
from megahedge.utils.errors import InputError, RunError
from tests.models.small import randomize, small_config

NEXT = torch.tensor([[0.0, 1.0, 3.0], [2.0, 0.0, 1.0], [1.0, 5.0, 0.0]])
"""Logits of the token that follows each token, whatever came before."""

MIXERS = {
    "teacher": MixerConfig(),
    "stage 1": MixerConfig(kind="hedgehog"),
    "paper": MixerConfig(kind="hedge_mamba"),
    "rope before the maps": MixerConfig(kind="hedge_mamba", rope="before", decay="head", decay_step="head", decay_per_head=True),
}


def bigrams(calls: list) -> ContinuationScorer:
    def logits(tokens):
        calls.append(tuple(tokens.shape))
        return NEXT[tokens]

    return ContinuationScorer(logits, max_length=4, batch_size=2)


def test_score_is_that_computed_by_hand():
    log_probability = NEXT.log_softmax(-1)
    scores = bigrams([]).score([([0], [2, 1]), ([1, 1], [0]), ([2], [0])])
    expected = [(log_probability[0, 2] + log_probability[2, 1], True), (log_probability[1, 0], True), (log_probability[2, 0], False)]
    assert [greedy for _, greedy in scores] == [greedy for _, greedy in expected]
    assert [value for value, _ in scores] == pytest.approx([float(value) for value, _ in expected], rel=1e-6)  # fp32 sums


def test_continuations_of_one_input_share_its_forward():
    calls = []
    scores = bigrams(calls).score([([0, 1], [0]), ([0, 1], [1]), ([0], [1, 2])])
    assert calls == [(1, 2)]
    assert math.exp(scores[0][0]) + math.exp(scores[1][0]) < 1
    assert scores[2][0] == pytest.approx(float(NEXT.log_softmax(-1)[0, 1] + NEXT.log_softmax(-1)[1, 2]), rel=1e-6)


def test_longer_requests_lose_their_first_tokens_and_are_counted(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("megahedge"), "propagate", True)
    calls = []
    scores = bigrams(calls).score([([0, 0, 0, 0, 1], [0]), ([1, 0, 0, 1], [0]), ([1], [0])])
    assert calls[0] == (2, 4)
    assert scores[0] == scores[1] == scores[2]
    assert "1 of 3 requests are longer than 4 tokens" in caplog.text


@pytest.mark.parametrize(
    ("request_", "message"), [(([], [1]), "0 tokens of context"), (([1], []), "0 to score"), (([1], [0] * 5), "takes 4")]
)
def test_what_cannot_be_scored_is_refused(request_, message):
    with pytest.raises(InputError, match=message):
        bigrams([]).score([request_])


def test_a_score_that_is_not_a_number_is_an_error():
    with pytest.raises(RunError, match="not finite"):
        ContinuationScorer(lambda tokens: NEXT[tokens] * math.nan, 4, 2).score([([0], [1])])


def test_greedy_text_by_hand():
    calls = []
    written = bigrams(calls).write([[0], [1], [0, 0, 0, 2]], 3, lambda tokens: tokens[-1] == 0)
    assert written == [[2, 1, 0], [0], [1, 0]]
    assert max(length for _, length in calls) <= 3
    with pytest.raises(InputError, match="leaves no room"):
        bigrams([]).write([[0]], 4, lambda tokens: False)


def random_requests(count: int = 16) -> list[tuple[list[int], list[int]]]:
    generator = torch.Generator().manual_seed(0)

    def draw(most: int) -> list[int]:
        length = int(torch.randint(1, most, (), generator=generator))
        return torch.randint(0, 97, (length,), generator=generator).tolist()

    return [(draw(60), draw(9)) for _ in range(count)]


@pytest.mark.parametrize("name", MIXERS)
def test_neither_scores_nor_text_depend_on_the_batch_size(name):
    """Pads are to the right of all that counts; what is left are sums of fp32 in another order.  The bound is that of the issue."""
    model = randomize(LanguageModel(small_config(mixer=MIXERS[name]))).eval()
    requests, contexts = random_requests(), [context for context, _ in random_requests(8)]
    alone, *batched = (ContinuationScorer(model, 64, size) for size in (1, 1, 8))
    expected = [alone.score([request])[0] for request in requests]
    texts = [alone.write([context], 4, lambda tokens: tokens[-1] < 20)[0] for context in contexts]
    for scorer in batched:
        scores = scorer.score(requests)
        assert [greedy for _, greedy in scores] == [greedy for _, greedy in expected]
        assert [value for value, _ in scores] == pytest.approx([value for value, _ in expected], abs=1e-4)
        assert scorer.write(contexts, 4, lambda tokens: tokens[-1] < 20) == texts


def test_no_batch_has_more_tokens_than_the_first():
    calls = []
    scorer = bigrams(calls)
    scorer.score([([token] * length, [0]) for token in range(3) for length in (1, 2, 3, 4)])
    assert calls[0] == (2, 4)
    assert all(rows * length <= 8 for rows, length in calls)
    assert max(rows for rows, _ in calls) > 2
