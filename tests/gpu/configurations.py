"""What is compiled and measured: every kind of scan at the head sizes of the Pythia models."""

import dataclasses

import torch

from megahedge.kernels import ScanState, causal_conv, scan, signed_softmax

HEAD_DIMS = (32, 64, 80, 128, 256)
"""Of Pythia 14M, 160M, 2.8B, 6.9B and 1B; a state is twice as large."""


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A kind of scan."""

    structure: str
    step_axis: str | None
    dtype: torch.dtype
    """Of V."""
    documents: bool = False
    normalize: bool = True
    narrow: bool = False
    """Whether features are in V's dtype, too."""

    def __str__(self) -> str:
        words = [self.structure, f"step {self.step_axis or '1'}", str(self.dtype).removeprefix("torch.")]
        words += ["features too"] * self.narrow + ["documents"] * self.documents + ["unnormalised"] * (not self.normalize)
        return ", ".join(words)

    def inputs(self, head_dim: int, *, batch: int, seq_len: int, heads: int, device: str = "meta") -> dict:
        """Arguments of a scan with random values, leaves that want a gradient where they are no masks."""
        state_size, lead = 2 * head_dim, (batch, seq_len, heads)
        sizes = {"shared": (1,), "state": (state_size,), "channel": (head_dim,)}
        tensors = {name: torch.randn(*lead, state_size, device=device).softmax(-1) for name in ("C", "B")}
        tensors["V"] = torch.randn(*lead, head_dim, device=device).to(self.dtype)
        if self.narrow:
            tensors |= {name: tensors[name].to(self.dtype) for name in ("C", "B")}
        if self.step_axis is not None:
            tensors["step"] = torch.rand(*lead, *sizes[self.step_axis], device=device)
        if self.structure != "none":
            shape = {"head": (heads,), "state": (1, state_size), "channel": (1, state_size, head_dim)}[self.structure]
            tensors["rate"] = torch.rand(shape, device=device)
        arguments = {name: x.requires_grad_() for name, x in tensors.items()}
        if self.documents:
            arguments["boundaries"] = torch.rand(batch, seq_len, device=device) < 0.01
        return arguments | {"normalize": self.normalize}


CONFIGURATIONS = (
    Configuration("channel", "channel", torch.bfloat16),  # of the recipe paper
    Configuration("channel", "state", torch.float32, documents=True),
    Configuration("none", None, torch.bfloat16),  # of stage 1, whose features are rotated
    Configuration("none", None, torch.bfloat16, narrow=True),  # of stage 1 of the recipe tuned
    Configuration("none", None, torch.float32, documents=True),
    Configuration("head", "shared", torch.bfloat16, narrow=True),  # of the recipe tuned
    Configuration("head", "shared", torch.float32, documents=True),
    Configuration("state", "state", torch.bfloat16, narrow=True),
    Configuration("state", "shared", torch.float32, documents=True),
)


def run_around(head_dim: int, *, batch: int, seq_len: int, heads: int, device: str = "meta") -> None:
    """What else Triton has kernels for, and the backward of it: the convolution of a layer's input, and the feature map's softmax."""
    x = torch.randn(batch, seq_len, heads * head_dim, device=device).bfloat16().requires_grad_()
    weight, bias = torch.randn(heads * head_dim, 4, device=device), torch.randn(heads * head_dim, device=device)
    boundaries = torch.rand(batch, seq_len, device=device) < 0.01
    causal_conv(x, weight.requires_grad_(), bias.requires_grad_(), boundaries=boundaries, backend="triton")[0].sum().backward()
    mapped = torch.randn(batch, seq_len, heads, head_dim, device=device).requires_grad_()
    signed_softmax(mapped, stored=torch.bfloat16).sum().backward()


def run_both_ways(arguments: dict, backend: str) -> tuple[torch.Tensor, ScanState]:
    """A scan and its backward."""
    y, state = scan(**arguments, backend=backend)
    torch.autograd.backward((y, state.numerator), (torch.ones_like(y), torch.ones_like(state.numerator)))
    return y, state
