"""What is compiled and measured: every kind of scan at the head sizes of the Pythia models."""

import dataclasses

import torch

from megahedge.kernels import ScanState, scan

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

    def __str__(self) -> str:
        words = [self.structure, f"step {self.step_axis or '1'}", str(self.dtype).removeprefix("torch.")]
        return ", ".join(words + ["documents"] * self.documents + ["unnormalised"] * (not self.normalize))

    def inputs(self, head_dim: int, *, batch: int, seq_len: int, heads: int, device: str = "meta") -> dict:
        """Arguments of a scan with random values, leaves that want a gradient where they are no masks."""
        state_size, lead = 2 * head_dim, (batch, seq_len, heads)
        sizes = {"shared": (1,), "state": (state_size,), "channel": (head_dim,)}
        tensors = {name: torch.randn(*lead, state_size, device=device).softmax(-1) for name in ("C", "B")}
        tensors["V"] = torch.randn(*lead, head_dim, device=device).to(self.dtype)
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
    Configuration("none", None, torch.bfloat16),  # of stage 1
    Configuration("none", None, torch.float32, documents=True),
    Configuration("head", "shared", torch.bfloat16),  # of the recipe tuned
    Configuration("head", "shared", torch.float32, documents=True),
    Configuration("state", "state", torch.bfloat16),
    Configuration("state", "shared", torch.float32, documents=True),
)


def run_both_ways(arguments: dict, backend: str) -> tuple[torch.Tensor, ScanState]:
    """A scan and its backward."""
    y, state = scan(**arguments, backend=backend)
    torch.autograd.backward((y, state.numerator), (torch.ones_like(y), torch.ones_like(state.numerator)))
    return y, state
