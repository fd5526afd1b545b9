"""The numeric kernels of the mixers: the normalised scan and the causal convolution with their backends, and the softmax of features."""

from megahedge.kernels.causal_conv import causal_conv
from megahedge.kernels.conv_registry import CONV_BACKENDS
from megahedge.kernels.features import signed_softmax
from megahedge.kernels.normaliser import DenominatorStats
from megahedge.kernels.problem import ScanState
from megahedge.kernels.registry import BACKENDS
from megahedge.kernels.scan import scan, scan_step

__all__ = ["BACKENDS", "CONV_BACKENDS", "DenominatorStats", "ScanState", "causal_conv", "scan", "scan_step", "signed_softmax"]
