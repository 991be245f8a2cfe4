class LossAccumulator: pass
