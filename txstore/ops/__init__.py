"""Operations on whole checkpoints."""
