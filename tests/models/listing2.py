"""Listing 2 of Attention to Mamba (arXiv 2604.14191) a second time, and Mamba, token by token and head by head, in fp64.

Nothing here is shared with megahedge.models or megahedge.kernels but the names of the parameters, so that a mistake cannot hide.
"""

# t seq_len, d hidden_size, p head_dim, n = 2 p state_size, k conv_kernel

import math

import torch
from torch import Tensor

from megahedge.config.model import ModelConfig

SOFTPLUS_INVERSE_OF_1 = math.log(math.e - 1)
SILU_INVERSE_OF_1 = 1.2784645427610738


def listing_2(parameters: dict[str, Tensor], config: ModelConfig, x: Tensor) -> Tensor:
    """What a mixer of kind hedge_mamba with these fp64 parameters makes of one normed document x [t, d]: [t, d]."""
    options = config.mixer
    filtered = convolve(parameters, x) if options.conv_kernel else x
    projected = filtered @ parameters["qkv_proj.weight"].T + parameters["qkv_proj.bias"]
    p = config.head_dim
    heads = []
    for head in range(config.num_heads):
        first = 3 * p * head
        q, k, v = (projected[:, first + part * p : first + (part + 1) * p] for part in range(3))
        C = features(parameters, config, q, "query_map", head)
        B = features(parameters, config, k, "key_map", head)
        heads.append(scan_head(C, B, v, *decay(parameters, config, filtered, head)))
    y = torch.cat(heads, dim=-1)
    if options.bypass:
        y = y + x @ parameters["bypass_proj.weight"].T + parameters["bypass_proj.bias"]
    if options.gate:
        logits = x @ parameters["gate_proj.weight"].T + parameters["gate_proj.bias"] + SILU_INVERSE_OF_1
        y = y * silu(logits)
    return y @ parameters["out_proj.weight"].T + parameters["out_proj.bias"]


def convolve(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    """Equation 12: the last tap is the token's own."""
    weight, bias = parameters["conv.weight"], parameters["conv.bias"]
    taps = weight.shape[1]
    rows = []
    for t in range(len(x)):
        row = bias.clone()
        for back in range(min(taps, t + 1)):
            row = row + weight[:, taps - 1 - back] * x[t - back]
        rows.append(row)
    return torch.stack(rows)


def features(parameters: dict[str, Tensor], config: ModelConfig, x: Tensor, name: str, head: int) -> Tensor:
    """One head's features [t, n] of x [t, p], rotated before or after the map."""
    options = config.mixer
    if options.rope == "before":
        x = rotate(x, config)
    mapped = feature_map(parameters, config, x, name, head)
    return rotate(mapped, config) if options.rope == "after" else mapped


def feature_map(parameters: dict[str, Tensor], config: ModelConfig, x: Tensor, name: str, head: int) -> Tensor:
    """Equation 6 for one head, x [t, p] → [t, n], written out."""
    weight, bias = parameters[f"{name}.weight"], parameters[f"{name}.bias"]
    if config.mixer.feature_map_per_head:
        weight, bias = weight[head], bias[head]
    rows = []
    for row in x:
        if config.mixer.feature_map_scale:
            row = row / math.sqrt(config.head_dim)
        z = [(sum(w * value for w, value in zip(weights, row, strict=True)) + b) for weights, b in zip(weight, bias, strict=True)]
        powers = [torch.exp(value) for value in z] + [torch.exp(-value) for value in z]
        total = sum(powers)
        rows.append(torch.stack([power / total for power in powers]))
    return torch.stack(rows)


def rotate(x: Tensor, config: ModelConfig) -> Tensor:
    """RoPE of the first rotary_dim entries: entry i turns with entry i + rotary_dim / 2."""
    half = config.rotary_dim // 2
    rows = x.clone()
    for position in range(len(x)):
        for i in range(half):
            # angles are fp32 in the model; positions and wavelengths are chosen here, so that they are the same
            frequency = 1.0 / torch.tensor(config.rotary_base) ** torch.tensor(2 * i / config.rotary_dim)
            angle = position * frequency
            cos, sin = angle.cos().double(), angle.sin().double()
            a, b = x[position, i], x[position, i + half]
            rows[position, i], rows[position, i + half] = a * cos - b * sin, b * cos + a * sin
    return rows


def decay(parameters: dict[str, Tensor], config: ModelConfig, x: Tensor, head: int) -> tuple[Tensor, Tensor]:
    """One head's Δ [t, n, p] and λ [n, p] (equation 11), written out; Δ, which multiplies B or V, multiplies their product."""
    options, p = config.mixer, config.head_dim
    n, seq_len = 2 * p, len(x)
    if options.decay == "none":
        return torch.ones(seq_len, n, p, dtype=x.dtype), torch.zeros(n, p, dtype=x.dtype)
    if "decay.step.down_weight" in parameters:
        x = x @ parameters["decay.step.down_weight"].T + parameters["decay.step.down_bias"]
    steps = x @ parameters["decay.step.up_weight"].T + parameters["decay.step.up_bias"]
    steps = torch.log1p(torch.exp(steps + SOFTPLUS_INVERSE_OF_1))
    rate = parameters["decay.rate.weight"]
    if options.decay_per_head:
        width = steps.shape[1] // config.num_heads
        steps, rate = steps[:, head * width : (head + 1) * width], rate[head]
    else:
        rate = rate[0]
    step = torch.empty(seq_len, n, p, dtype=x.dtype)
    full_rate = torch.empty(n, p, dtype=x.dtype)
    for feature in range(n):
        own = feature % p if options.decay_tie_signs else feature
        for channel in range(p):
            place = {"head": (), "state": (own,), "channel": (own, channel)}[options.decay]
            full_rate[feature, channel] = rate[place]
            column = {"head": 0, "state": own, "channel": channel}[options.decay_step]
            step[:, feature, channel] = steps[:, column]
    return step, full_rate


def scan_head(C: Tensor, B: Tensor, V: Tensor, step: Tensor, rate: Tensor) -> Tensor:
    """Equations 2, 3, 9, 10 and 11: C, B [t, n], V [t, p], Δ [t, n, p], λ [n, p] → [t, p], one token and channel after another."""
    seq_len, p = V.shape
    state, ones = torch.zeros_like(rate), torch.zeros_like(rate)
    rows = []
    for t in range(seq_len):
        keep = torch.exp(-rate * step[t])
        state = keep * state + step[t] * B[t].unsqueeze(1) * V[t].unsqueeze(0)
        ones = keep * ones + step[t] * B[t].unsqueeze(1)
        rows.append(torch.stack([(C[t] @ state[:, channel]) / (C[t] @ ones[:, channel]) for channel in range(p)]))
    return torch.stack(rows)


def mamba(parameters: dict[str, Tensor], config: ModelConfig, x: Tensor) -> Tensor:
    """What a mixer of kind mamba makes of x [t, d]: algorithm 2 of Mamba (arXiv 2312.00752), one head, token and channel after another."""
    p = config.head_dim
    filtered = silu(convolve(parameters, x) if config.mixer.conv_kernel else x)
    values, gate = filtered @ parameters["x_proj.weight"].T, silu(x @ parameters["z_proj.weight"].T)
    B, C = (filtered @ parameters[f"{name}_proj.weight"].T for name in "BC")
    low = filtered @ parameters["step.down_weight"].T + parameters["step.down_bias"]
    step = torch.log1p(torch.exp(low @ parameters["step.up_weight"].T + parameters["step.up_bias"] + SOFTPLUS_INVERSE_OF_1))
    y = torch.zeros_like(values)
    for head in range(config.num_heads):
        n = len(parameters["rate.log_rate"][head])
        for channel in range(p):
            column, rate = head * p + channel, torch.exp(parameters["rate.log_rate"][head, :, channel])
            state = torch.zeros_like(rate)
            for t in range(len(x)):
                own = slice(head * n, (head + 1) * n)
                state = torch.exp(-step[t, column] * rate) * state + step[t, column] * B[t, own] * values[t, column]
                y[t, column] = C[t, own] @ state + parameters["skip.weight"][head, channel] * values[t, column]
    return (y * gate) @ parameters["y_proj.weight"].T


def silu(x: Tensor) -> Tensor:
    """x σ(x)."""
    return x / (1 + torch.exp(-x))
