"""Operations on tensors whose sizes depend on data, at sizes that hold any selection."""
