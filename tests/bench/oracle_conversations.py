"""Conversations of the calculator's best player, for a teacher that is trained quickly."""

from tasks import NUM_CONVERSATIONS, conversation, oracle_player, problems


def conversations() -> list[dict]:
    """On training problems, as the warm start's."""
    return [conversation(q, oracle_player(q, None)) for q in problems("train")[:NUM_CONVERSATIONS]]
