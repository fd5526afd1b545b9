"""torch.compile takes a whole block, mixer and all, in one graph."""

import pytest
import torch

from megahedge.config.mixer import MixerConfig
from megahedge.kernels import DenominatorStats
from megahedge.models.context import SequenceContext
from megahedge.models.language_model import LanguageModel
from tests.models.small import random_tokens, randomize, small_config

MIXERS = {
    "stage-1": MixerConfig(kind="hedgehog"),
    "paper": MixerConfig(kind="hedge_mamba"),
    "tuned": MixerConfig(kind="hedge_mamba", decay="head", decay_step="head", feature_map_per_head=True, rope="before"),
}


@pytest.mark.parametrize("name", MIXERS)
def test_a_compiled_block_computes_what_it_does_uncompiled(name):
    torch.compiler.reset()
    config = small_config(num_layers=1, mixer=MIXERS[name])
    model = randomize(LanguageModel(config).double())
    block, tokens = model.blocks[0], random_tokens(config.vocab_size)
    hidden = torch.randn(2, 13, config.hidden_size, dtype=torch.float64)
    results = []
    for run in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        stats, leaf = DenominatorStats(), hidden.clone().requires_grad_()
        output = run(leaf, SequenceContext.of(tokens, config, stats=stats))
        output = output[0] if isinstance(output, tuple) else output
        output.square().sum().backward()
        gradients = {key: parameter.grad for key, parameter in block.named_parameters() if parameter.grad is not None}
        results.append((output.detach(), leaf.grad, gradients, int(stats.total)))
    (output, grad, gradients, total), (other, other_grad, other_gradients, other_total) = results
    torch.testing.assert_close(other, output, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(other_grad, grad, rtol=1e-10, atol=1e-12)
    assert gradients.keys() == other_gradients.keys() and total == other_total > 0
    for key, gradient in gradients.items():
        torch.testing.assert_close(other_gradients[key], gradient, rtol=1e-10, atol=1e-10, msg=key)
