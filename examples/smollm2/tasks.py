"""Questions with two possible answers about words, and their split by word.

    python tasks.py     # how many questions there are

Which kind of thing a word is, a small language model half knows; that its answer must name the
kind, and only the right one, it does not know at all.
"""

from hashlib import sha256
from itertools import permutations

from outloop.envs.tasks.splits import split_of

TITLE = "SmolLM2-135M-Instruct learns to say which of two things a word is"

KINDS = {
    "animal": (
        "an",
        "a dog, a cat, a horse, a cow, a pig, a sheep, a goat, a rabbit, a fox, a wolf, a "
        "bear, a lion, a tiger, a monkey, a camel, a giraffe, a zebra, a deer, a squirrel, "
        "a dolphin, a shark, a frog, a snake, a turtle, an elephant, an owl, an eagle, a "
        "penguin",
    ),
    "fruit": (
        "a",
        "an apple, a banana, a cherry, a grape, a lemon, a mango, a melon, a peach, a pear, "
        "a plum, a strawberry, a pineapple, a papaya, a blueberry, a raspberry, a coconut, "
        "an apricot, a fig",
    ),
    "city": (
        "a",
        "Paris, London, Berlin, Rome, Madrid, Tokyo, Beijing, Cairo, Moscow, Chicago, "
        "Boston, Vienna, Oslo, Athens, Lisbon, Dublin, Prague, Seoul, Toronto, Sydney, "
        "Mumbai, Istanbul",
    ),
    "color": (
        "a",
        "red, blue, green, yellow, purple, white, black, brown, gray, pink, violet, "
        "turquoise, beige",
    ),
    "sport": (
        "a",
        "tennis, football, basketball, baseball, hockey, golf, rugby, swimming, boxing, "
        "volleyball, cricket, wrestling, badminton, skiing, cycling",
    ),
    "metal": (
        "a",
        "iron, silver, copper, zinc, aluminum, nickel, lead, platinum, titanium, steel, brass, tin",
    ),
    "instrument": (
        "an",
        "a piano, a guitar, a violin, a flute, a trumpet, a drum, a harp, a cello, a "
        "clarinet, a saxophone, an organ, a trombone, a banjo, a tuba",
    ),
    "language": (
        "a",
        "English, French, German, Spanish, Italian, Russian, Arabic, Japanese, Chinese, "
        "Portuguese, Korean, Hindi, Swedish, Greek, Latin",
    ),
}
"""Kind -> its article, and words that are of it and of no other kind."""
SHARES = {"train": 3, "test": 1}


def questions(split: str) -> list[dict[str, str]]:
    """Every question about the words of a split; a hash of the word decides its split."""
    rows = []
    for first, second in permutations(KINDS, 2):
        for kind in (first, second):
            for word in KINDS[kind][1].split(", "):
                if split_of({"word": word}, SHARES) != split:
                    continue
                choice = " or ".join(f"{KINDS[name][0]} {name}" for name in (first, second))
                other = second if kind == first else first
                row = {"question": f"Is {word} {choice}?", "answer": kind, "other": other}
                rows.append(row)
    # Neighbours are about different words, so that the first of them are a sample of all.
    return sorted(rows, key=lambda row: split_key(row["question"]))


def split_key(text: str) -> int:
    """A number that has nothing to do with the meaning of the text."""
    return int.from_bytes(sha256(text.encode()).digest()[:8], "big")


def train_tasks() -> list[dict[str, str]]:
    """What RL practises on."""
    return questions("train")


def eval_tasks() -> list[dict[str, str]]:
    """What the curve is measured on: questions about words that training never shows."""
    return questions("test")


if __name__ == "__main__":
    print({split: len(questions(split)) for split in SHARES})
