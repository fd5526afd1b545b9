"""Text to token files, token files to batches: Megatron's indexed format, sample order, blending, loaders."""
