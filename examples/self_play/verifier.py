"""The rules: stones on a heap, each move takes one to three, whoever takes the last stone wins."""

MAX_TAKEN = 3


class Heap:
    """One game, and whose move it is."""

    def __init__(self, stones: int) -> None:
        self.stones = stones
        self.mover = 0
        self.winner: int | None = None

    @property
    def shown(self) -> str:
        """What a player is told: everything that matters."""
        return f"{self.stones} left"

    def take(self, answer: str) -> None:
        """Make a move; whoever answers something that is no move has lost."""
        text = answer.strip()
        taken = int(text) if text in ("1", "2", "3") else 0
        other = 1 - self.mover
        if not 1 <= taken <= min(MAX_TAKEN, self.stones):
            self.winner = other
            return
        self.stones -= taken
        if self.stones == 0:
            self.winner = self.mover
        self.mover = other
