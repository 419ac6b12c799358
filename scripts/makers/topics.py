"""Writes the text stage's prompts: topics for training and other topics that are held out."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

MOOD = "This is wonderful and it makes me happy."
"""What the held-out judge compares a text with; no reward of the training stage knows it."""

TRAIN = """
the sea; a rainy Monday; an old bicycle; winter mornings; my neighbour's dog; a long train ride; the city
library; fresh bread; a broken window; the first day of school; a lost letter; mountain roads; the night sky;
a crowded bus; wooden chairs; summer storms; a quiet street; an empty fridge; the local market; a tall
building; morning coffee; a walk in the fog; garden tools; a new job; the river bank; old photographs; a noisy
classroom; street musicians; a slow computer; the autumn leaves; a visit to the dentist; an ancient bridge;
the corner shop; a paper boat; late homework; a desert island; the football match; a hospital corridor; black
cats; a wedding guest; the village square; a muddy field; the last page of a book; a power cut; cold soup; an
airport at night; a wet umbrella; the school bell; a forgotten key; a farm in spring; the evening news; an
unmade bed; a long queue; the post office; an old clock; heavy traffic; a pair of shoes; the dark cellar; a
chess game; a small kitchen; the lighthouse; a rusty gate; the bus driver; a birthday card; the museum guard;
dry flowers; a steep hill; a phone call; the harbour; a stone wall; the tax office; a leaking roof; a fishing
trip; a science lesson; the spare room; the railway station; a pile of papers; a narrow lane; an office
meeting; the baker; a pencil; the snow; a mirror; the forest path; a suitcase; cheap furniture; the opera; a
hungry bird; a cup of tea; a winter coat; the barber; a small island; the town hall; a wild horse; the moon; a
train ticket; the waiting room; an early alarm; a stray cat; the attic; a road map; a cracked plate; the
theatre; the vegetable garden; a parking ticket; a swimming lesson; the factory; a crossword puzzle; the night
shift; a wooden spoon; an elevator; the front door; a thunderstorm; the laundry; a bank clerk; an old radio; a
candle; the playground; a ladder; the kitchen sink; a business trip; the dusty shelf; a tent; a violin; the
coast road; a snowman; an apple tree; the courtroom; a taxi ride; the bakery; a mountain lake; the new
neighbours; a cardboard box; the gym; a broken toy; the recipe; a farmer; the highway; a sleeping child; the
basement; a red balloon; the zoo; a puddle; the newspaper; an exam; the ferry; a blanket; the mechanic; a
snail; the choir; a passport; the elevator music; a wheelbarrow; the headmaster; an onion; the shipyard; a
telescope; the subway; a haircut
"""

HELD_OUT = """
the desert at noon; a bus stop; an old sailor; the cinema; a flat tyre; an orchard; the tailor; a frozen lake;
the supermarket; a piano; the balcony; a job interview; the windmill; a kite; the cafeteria; a sandy beach; a
stapler; the stadium; a blue door; the plumber; a lantern; the vineyard; a math test; a wooden fence; the
circus; a cloudy afternoon; a guitar; the embassy; a donkey; the hallway; a campfire; the grocery list; a
tunnel; a typewriter; the rooftop; an electrician; a duck pond; the painter; a warehouse; a dinner party; the
sewing machine; a canoe; the fountain; a bookshop; a sore throat; the quarry; a hat; the monastery; a
skateboard; the greenhouse; a referee; the pharmacy; a hedgehog; a coal mine; the chimney; a jigsaw; the
botanist; a toolbox; the valley; a salad; the night train; a drawing lesson; the carpet; an octopus; the
courtyard; a sandwich; the glacier; a wristwatch; the pilot; a scarf; the aquarium; a hammock; the printer; a
lemon; the junction; a beehive; the tram; a notebook; the canyon; a button; the dairy; a paintbrush
"""


def topics(text: str) -> list[str]:
    """The topics of one of the blocks above."""
    return [" ".join(topic.split()) for topic in text.split(";")]


def main() -> None:
    """Writes `text_train.jsonl` and `text_heldout.jsonl`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("assets/prompts"), help="folder to write to")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    train, held_out = topics(TRAIN), topics(HELD_OUT)
    if set(train) & set(held_out) or len(set(train)) < len(train) or len(set(held_out)) < len(held_out):
        raise SystemExit(f"topics repeat: {sorted(set(train) & set(held_out))}")
    for name, chosen in (("text_train", train), ("text_heldout", held_out)):
        lines = [
            json.dumps({"prompt": f"Write one short sentence about {topic}.", "topic": topic, "mood": MOOD})
            for topic in chosen
        ]
        (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{name}: {len(lines)} prompts")


if __name__ == "__main__":
    main()
