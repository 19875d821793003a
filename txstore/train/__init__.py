"""Complete training state: what a recovery point carries beyond the tensors of a model (ADR 0006)."""
