"""Time the ops and the model, quantized against the original."""
