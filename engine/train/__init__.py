"""The trainer: take groups, build a batch, update the policy, publish, checkpoint."""
