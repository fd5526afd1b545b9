"""Constants of which a parameter stores the difference only, because bf16 cannot hold them; they travel with an exported model."""

GATE_OFFSET = 1.2784645427610737
"""SiLU⁻¹(1): the gate's bias at which it lets everything through."""
STEP_OFFSET = 0.541324854612918
"""SoftPlus⁻¹(1) = log(e − 1): the bias of the step Δ at which it is 1."""
