"""Writes corpus.txt, the text that the demo trains on: invented harbour logs, the same bytes on every run.

python examples/demo/make_corpus.py > examples/demo/corpus.txt
"""

from __future__ import annotations

import random
import sys

ENTRIES = 700


def words(text: str) -> list[str]:
    return text.split(", ")


SHIPS = words(
    "Alma, Corvina, Dunlin, Esker, Fulmar, Gannet, Halcyon, Isolde, Juniper, Kestrel, Lapwing, Merrow, Nerissa"
)
MASTERS = words(
    "Abel, Brandt, Castell, Drury, Eames, Fenn, Garrick, Hollis, Ivers, Jessop, Keane, Lorne, Marsh, Nairn, Orme"
)
PORTS = words("Ardmouth, Bellhaven, Cold Quay, Dunmore, Eastness, Farrow Bay, Grey Point, Holm, Inver, Kilbrae")
CARGO = words("barley, salt, timber, slate, wool, lamp oil, coal, rope, apples, iron, glass, letters, tar, linen")
WINDS = words("a light air, a steady breeze, a fresh gale, squalls, hardly any wind, a falling wind, a hard blow")
POINTS = words("north, north-east, east, south-east, south, south-west, west, north-west")
SEAS = words("smooth, choppy, grey and rising, long and slow, broken over the bar, flat as a slate, confused")
FAULTS = (
    "a line parted at the second bollard and was spliced before dusk",
    "the pilot came late and the tide did not wait for him",
    "two casks were short and the tally was taken again",
    "the lantern on the mole went out and was lit again by hand",
    "a plank had sprung below the waterline; the pumps kept ahead of it",
    "the harbour chain stuck half way and was freed with a bar",
    "fog closed the channel for an hour and the bell was rung",
    "the crane stood still for want of a pin, and a new one was forged",
)
PROVERBS = (
    "What is not written in the log did not happen.",
    "A tally half done is no tally.",
    "Trust the record, then the rope, then the weather.",
    "Count twice, sign once.",
    "The tide keeps no promises and breaks none.",
    "He who sails on a guess comes home on a plank.",
)


def pick(rng: random.Random, words: tuple[str, ...] | list[str]) -> str:
    """One of the words. From random() alone, whose sequence Python promises to keep."""
    return words[int(rng.random() * len(words))]


def number(rng: random.Random, low: int, high: int) -> int:
    return low + int(rng.random() * (high - low))


def entry(rng: random.Random, day: int) -> str:
    ship, master = pick(rng, SHIPS), pick(rng, MASTERS)
    came, goes = pick(rng, PORTS), pick(rng, PORTS)
    days, tons = number(rng, 2, 19), number(rng, 10, 400)
    lines = [
        f"Day {day}. The {ship}, master {master}, {days} days from {came} with {tons} tons of {pick(rng, CARGO)}.",
        f"Wind from the {pick(rng, POINTS)}, {pick(rng, WINDS)}; the sea {pick(rng, SEAS)}.",
    ]
    if rng.random() < 0.6:
        fault = pick(rng, FAULTS)
        lines.append(fault[0].upper() + fault[1:] + ".")
    lines.append(f"She loads {pick(rng, CARGO)} for {goes} and leaves with the tide at {number(rng, 1, 12)} bells.")
    if rng.random() < 0.3:
        lines.append(pick(rng, PROVERBS))
    return " ".join(lines)


def main() -> None:
    rng = random.Random(1851)
    sys.stdout.write("\n".join(entry(rng, day) for day in range(1, ENTRIES + 1)) + "\n")


if __name__ == "__main__":
    main()
