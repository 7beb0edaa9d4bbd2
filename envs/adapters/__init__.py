"""Environments that people already have, played as rollout functions.

One module for each kind. `tasks(...)` makes its tasks, `play(task, episode)` is what
`--rollout-function-path` names.
"""
