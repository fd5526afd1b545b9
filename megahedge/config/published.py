"""Public figures that a plan needs where neither a network nor a GPU is at hand: Pythia's sizes, and GPUs."""

import dataclasses

from megahedge.utils.errors import check_known


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One kind of GPU, from its vendor's data sheet."""

    memory_gib: float
    """What CUDA reports as its memory, about, with error correction where there is any; GiB."""
    bf16_tflops: float
    """Peak of dense bf16 matrix products with fp32 sums, 10¹² operations a second."""
    fp32_tflops: float
    """The same of fp32, without TF32."""
    driver_names: tuple[str, ...]
    """What torch.cuda.get_device_name gives."""

    def peak_tflops(self, dtype: str) -> float:
        """Of a run in `dtype`, bf16 or fp32."""
        return self.bf16_tflops if dtype == "bf16" else self.fp32_tflops


GPUS = {
    "A10": Gpu(22.0, 125.0, 31.2, ("NVIDIA A10",)),
    "A100-40G": Gpu(39.4, 312.0, 19.5, ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB")),
    "A100-80G": Gpu(79.1, 312.0, 19.5, ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe")),
    "H100-80G": Gpu(79.1, 989.0, 66.9, ("NVIDIA H100 80GB HBM3",)),
    "H200": Gpu(139.8, 989.0, 66.9, ("NVIDIA H200",)),
    "L40S": Gpu(44.4, 362.0, 91.6, ("NVIDIA L40S",)),
    "RTX4090": Gpu(23.5, 165.0, 82.6, ("NVIDIA GeForce RTX 4090",)),
}
"""By the name of --gpu; A100, H100 and H200 in their SXM form."""


def find_gpu(name: str) -> Gpu:
    """The GPU of that name.  Raises InputError, naming those that there are."""
    check_known("gpu", name, GPUS)
    return GPUS[name]


def known_gpu(driver_name: str) -> Gpu | None:
    """The GPU that its driver calls `driver_name`; None for one that is not listed."""
    return next((gpu for gpu in GPUS.values() if driver_name in gpu.driver_names), None)


def _pythia(hidden_size: int, num_layers: int, num_heads: int, vocab_size: int = 50304) -> dict:
    """What Pythia's config.json says of one size; the rest is the family's default."""
    return {
        "model_type": "gpt_neox",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "intermediate_size": 4 * hidden_size,
        "max_position_embeddings": 2048,
        "rotary_pct": 0.25,
    }


PYTHIA = {
    "70m": _pythia(512, 6, 8),
    "160m": _pythia(768, 12, 12),
    "410m": _pythia(1024, 24, 16),
    "1b": _pythia(2048, 16, 8),
    "1.4b": _pythia(2048, 24, 16),
    "2.8b": _pythia(2560, 32, 32),
    "6.9b": _pythia(4096, 32, 32, 50432),
    "12b": _pythia(5120, 36, 40, 50688),
}
"""Hugging Face configs of the Pythia suite (arXiv 2304.01373), by the size in the name."""


def pythia_config(name: str) -> dict | None:
    """The published config of EleutherAI/pythia-SIZE, with or without the owner or `-deduped`; None for any other name."""
    size = name.removeprefix("EleutherAI/").removesuffix("-deduped").removeprefix("pythia-")
    return PYTHIA.get(size) if "pythia-" in name else None
