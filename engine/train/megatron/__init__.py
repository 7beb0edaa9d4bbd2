"""The model and its optimizer on Megatron-core."""
