"""outloop: reinforcement learning for agents, with the loop outside.

Owns: the import name. Does not own: any behaviour; each part is a sub-package.
Invariant: importing this package loads nothing else.
"""

__version__ = "0.1.0"
