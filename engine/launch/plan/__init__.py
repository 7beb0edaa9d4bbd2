"""How fast a run would be, what it would need and cost: before it is started.

Owns: a simulator of the loop under the buffer's admission, closed forms beside it, and the
arithmetic of memory, networks and prices. Does not own: measuring. Invariant: pure functions of
their arguments; nothing here imports torch or redis, opens a socket or reads a clock.
"""
